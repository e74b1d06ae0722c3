// A recorded pass: phases of operations over buffers that do not move, and the threads that run it.
//
// An operation is so many tasks, known when a pass begins; tasks of one phase are independent, and
// whoever is free takes the next. A phase is over when its tasks are done, not when every thread
// has come by: on a crowded machine a thread without a core keeps nobody waiting on the way.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

// A piece of one sequence: rows [first, first + count) at positions from `start`.
struct Segment {
    int64_t first, count, start;
    const int64_t* states;  // page of each KDA group
    const int64_t* pages;   // of its latents, in order
    int64_t num_saves;
    const int64_t* saves;  // (tokens into it, page of each KDA group): states to keep
    int64_t window, accepted, advance;
};

constexpr int TILE = 16;  // rows of an attention task

// Up to TILE rows of one segment.
struct Tile {
    int64_t segment, first, count;
};

// The numbers of one pass.
struct Pass {
    int64_t rows, groups;
    const int64_t* ids;
    std::vector<int64_t> wanted;  // rows whose logits are asked for
    std::vector<Segment> segments;
    std::vector<Tile> tiles;

    // [rows, groups, wanted, segments], ids, wanted, then each segment: count, start, window,
    // accepted, advance, number of pages, number of saves, states, pages, saves.
    explicit Pass(const int64_t* numbers) {
        const int64_t* at = numbers;
        rows = at[0], groups = at[1];
        const int64_t num_wanted = at[2], num_segments = at[3];
        ids = at + 4;
        at = ids + rows;
        wanted.assign(at, at + num_wanted);
        at += num_wanted;
        int64_t first = 0;
        for (int64_t s = 0; s < num_segments; ++s) {
            Segment one{};
            one.first = first, one.count = at[0], one.start = at[1];
            one.window = at[2], one.accepted = at[3], one.advance = at[4];
            const int64_t num_pages = at[5];
            one.num_saves = at[6];
            one.states = at + 7;
            one.pages = one.states + groups;
            one.saves = one.pages + num_pages;
            at = one.saves + one.num_saves * (1 + groups);
            for (int64_t i = 0; i < one.count; i += TILE)
                tiles.push_back({s, i, one.count - i < TILE ? one.count - i : TILE});
            segments.push_back(one);
            first += one.count;
        }
    }
};

struct Op {
    std::function<int64_t(const Pass&)> tasks;
    std::function<void(const Pass&, int64_t)> run;
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// One run of a program: what threads that take part share.
class Job {
  public:
    Job(const std::vector<std::vector<Op>>& phases, const Pass& pass) : phases(phases), pass(pass) {
        for (const auto& ops : phases) {
            ends.emplace_back();
            int64_t total = 0;
            for (const auto& op : ops) ends.back().push_back(total += op.tasks(pass));
        }
        next = std::make_unique<std::atomic<int64_t>[]>(phases.size());
        done = std::make_unique<std::atomic<int64_t>[]>(phases.size());
        for (size_t i = 0; i < phases.size(); ++i) next[i] = done[i] = 0;
    }

    void work() {
        for (size_t i = 0; i < phases.size(); ++i) {
            const auto& stops = ends[i];
            const int64_t total = stops.empty() ? 0 : stops.back();
            for (int64_t task; (task = next[i].fetch_add(1)) < total; done[i].fetch_add(1)) {
                size_t op = 0;
                while (task >= stops[op]) ++op;
                phases[i][op].run(pass, task - (op ? stops[op - 1] : 0));
            }
            for (int spins = 0; done[i].load(std::memory_order_acquire) < total; ++spins)
                spins < 2000 ? relax() : std::this_thread::yield();
        }
    }

  private:
    const std::vector<std::vector<Op>>& phases;
    const Pass& pass;
    std::vector<std::vector<int64_t>> ends;  // of each operation's tasks, within a phase
    std::unique_ptr<std::atomic<int64_t>[]> next, done;
};

struct Program {
    std::vector<std::vector<Op>> phases;

    void add(std::function<int64_t(const Pass&)> tasks,
             std::function<void(const Pass&, int64_t)> run) {
        if (phases.empty()) phases.emplace_back();
        phases.back().push_back({std::move(tasks), std::move(run)});
    }

    void run(const int64_t* numbers, int threads) const {
        const Pass pass(numbers);
        Job job(phases, pass);
        // OpenMP's threads are those of torch: a second crowd would fight with it for the cores
#pragma omp parallel num_threads(threads)
        job.work();
    }
};
