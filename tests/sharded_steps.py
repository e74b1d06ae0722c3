"""A few steps of a run as each process sees them, for comparison with other layouts."""

from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 3


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def train(world, recipe):
    """Results of each step, and the rows here of the weights and their last gradients."""
    from openk3.train.setup import build_trainer
    from openk3.train.sources import open_data

    trainer = build_trainer(recipe, open_data(recipe), world)
    trainer.prepare()
    stepper, results, grads, reductions = trainer.stepper, [], {}, Reductions()
    update = stepper._update

    def keep(found, norm, lr):
        grads.update(
            {n: g.cpu().clone() for n, g in zip(stepper.masters.weights, found, strict=True)}
        )
        return update(found, norm, lr)

    stepper._update = keep
    with reductions:
        for step in range(STEPS):
            batches = [next(trainer.loader).to(world.device) for _ in range(trainer.num_micro)]
            results.append(stepper(batches, trainer.learning_rate(step + 1)))
    rows = stepper.masters.rows or {}
    held = {
        name: (rows.get(name, (0, len(w))), grads[name], w.detach().cpu())
        for name, w in stepper.masters.weights.items()
    }
    buffers = {n: b.cpu() for n, b in trainer.model.named_buffers() if "correction" in n}
    return results, held, buffers, reductions.count / STEPS
