"""Which roundings make the KDA kernels' errors: their arithmetic in float64, roundings as switches.

    python benchmarks/kda_rounding.py [--tokens 1024] [--heads 8] [--shift 0]

Values become bf16 exactly where the Triton kernels make them so, and nothing else is rounded, on
random inputs as in benchmarks/kda.py; runs on a CPU in a minute. Errors are
`|got - exact| / |exact|` in units of 1e-3; of dA_log, a sum that may be next to nothing, relative
to the norm of its terms.

The last rows change the kernels' arithmetic: `beta` leaves the tile's inverse, whose diagonal is
then 1, and goes to k- and kg; `diagonal` sums that of P in float32 instead of taking it from a
product of rounded operands; `wide U` stores U in float32, and X takes 16 bits of it.

Legend: H heads, T tokens, n tiles of C = 16, m blocks of L = 64, D head width.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

C, L, D, LOWER_BOUND = 16, 64, 128, -5.0
ROUNDED = {
    "k_minus": "k-",
    "q_plus": "q+, in P",
    "PT": "P T",
    "T": "T",
    "U": "U, in kg^T U",
    "kg": "kg",
    "U_stored": "U, stored",
    "X": "X",
    "writers": "keys of writers, in X k",
    "readers": "queries of readers, in X^T q",
    "dV": "dV, stored",
    "outputs": "outputs",
}
OTHERS = ("k_plus", "W", "Q", "S", "S_stored", "dS", "dS_stored", "Y", "Z", "key_readers")
EVERYTHING = frozenset((*ROUNDED, *OTHERS))
CHANGES = frozenset(("beta", "diagonal", "wide U"))
OUTPUTS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")


class Emulation:
    """Kernels that round the values named in `rounded`, with some `changes` of their arithmetic."""

    def __init__(self, rounded: frozenset[str], changes: frozenset[str] = frozenset()) -> None:
        self.rounded, self.changes = rounded, changes

    def round(self, name: str, x: Tensor) -> Tensor:
        return x.bfloat16().double() if name in self.rounded else x

    def __call__(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        tiles = self.prepare(x)
        o, state, U, S = self.scan_forward(x, tiles)
        dV, dS = self.scan_backward(x, tiles)
        return {"o": self.round("outputs", o), "state": state} | self.gradients(x, o, U, S, dV, dS)

    def prepare(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """[H, n, ...] of every tile."""
        q, k, beta, decay = (by(x[n], C) for n in ("q", "k", "beta", "decay"))
        G = decay.cumsum(2)
        whole = G[:, :, -1:].exp()
        written = k * beta if "beta" in self.changes else k
        k_minus = self.round("k_minus", written * (-G).exp())
        k_plus = self.round("k_plus", k * G.exp())
        A = (k_plus @ k_minus.mT).tril(-1)
        P = (self.round("q_plus", q * G.exp()) @ k_minus.mT).tril()
        if "diagonal" in self.changes:
            P = P.tril(-1) + torch.diag_embed((q * written).sum(-1))
        if "beta" in self.changes:
            T = torch.linalg.inv(torch.eye(C) + A)
        else:
            T = torch.linalg.inv(torch.eye(C) + beta * A) * beta.mT
        PT = self.round("PT", P @ T)
        T = self.round("T", T)
        kg = self.round("kg", written * (G[:, :, -1:] - G).exp())
        W = self.round("W", T @ k_plus)
        Q = self.round("Q", q * G.exp() - PT @ k_plus)
        return {"T": T, "PT": PT, "W": W, "Q": Q, "kg": kg, "whole": whole.mT}

    def scan_forward(self, x: dict[str, Tensor], tiles: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """-> o, final state, U [H, T, D], states at the starts of blocks [H, m, K, V]."""
        v = by(x["v"], C)
        S = torch.zeros(v.shape[0], D, D)
        o, updates, starts = [], [], []
        for t in range(v.shape[1]):
            m = {name: y[:, t] for name, y in tiles.items()}
            if t * C % L == 0:
                starts.append(self.round("S_stored", S))
            S_in = self.round("S", S)
            U = m["T"] @ v[:, t] - m["W"] @ S_in
            o.append(m["Q"] @ S_in + m["PT"] @ v[:, t])
            updates.append(U)
            S = m["whole"] * S + m["kg"].mT @ self.round("U", U)
        return torch.cat(o, 1), S, torch.cat(updates, 1), torch.stack(starts, 1)

    def scan_backward(self, x: dict[str, Tensor], tiles: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """-> dV [H, T, D], gradients of the states at the ends of blocks [H, m, K, V]."""
        d_o = by(x["d_o"], C)
        dS = torch.zeros(d_o.shape[0], D, D)
        dV, ends = [], []
        for t in reversed(range(d_o.shape[1])):
            m = {name: y[:, t] for name, y in tiles.items()}
            if (t + 1) * C % L == 0:
                ends.append(self.round("dS_stored", dS))
            Y = self.round("Y", m["kg"] @ self.round("dS", dS))
            dV.append(m["PT"].mT @ d_o[:, t] + m["T"].mT @ Y)
            dS = m["whole"] * dS + m["Q"].mT @ d_o[:, t] - m["W"].mT @ Y
        return torch.cat(dV[::-1], 1), torch.stack(ends[::-1], 1)

    def gradients(
        self, x: dict[str, Tensor], o: Tensor, U: Tensor, S: Tensor, dV: Tensor, dS: Tensor
    ) -> dict[str, Tensor]:
        d_v, dV = self.round("outputs", dV), by(self.round("dV", dV), L)
        o = by(self.round("outputs", o), L)
        if "wide U" not in self.changes:
            U = self.round("U_stored", U)
        if "beta" in self.changes:
            U = U * x["beta"]
        U = by(U, L)
        U_in = self.round("U_stored", U)
        U_X = U_in + self.round("U_stored", U - U_in) if "wide U" in self.changes else U_in
        q, k, v, d_o, beta, gate = (by(x[n], L) for n in ("q", "k", "v", "d_o", "beta", "gate"))
        X = self.round("X", (d_o @ U_X.mT).tril())
        minus_Z = -self.round("Z", (dV @ U_in.mT).tril(-1))
        du = (dV * U).sum(-1, keepdim=True)
        q_sum = (d_o * o).sum(-1, keepdim=True) * D
        k_sum = 2 * du / beta - (dV * v).sum(-1, keepdim=True)

        G = by(x["decay"], L).cumsum(2)
        late, end = G[:, :, 47:48], G[:, :, -1:]
        first = (torch.arange(L) < L // 2)[:, None]
        pivot = torch.where(first, G[:, :, 15:16], late)
        rows, back, to_late = (G - pivot).exp(), (pivot - G).exp(), (late - G).exp()
        own, other = self.round("writers", k * back), self.round("writers", k * to_late)
        q_in, k_in = self.round("readers", q * rows), self.round("key_readers", k * rows)

        past = G.exp() * (d_o @ S.mT)
        inner = torch.where(first, X @ own, X @ other)
        dg = q * past + q_in * inner
        dq = x["q_rstd"] * flat(past + rows * inner - q * q_sum)
        past = G.exp() * (dV @ S.mT)
        inner = torch.where(first, minus_Z @ own, minus_Z @ other)
        dg += k_in * inner - k * past
        dk = rows * inner - past
        for half, writers, scale in ((first, own, back), (~first, other, to_late)):
            written = X.mT @ (q_in * half) + minus_Z.mT @ (k_in * half)
            dg -= writers * written
            dk += scale * written
        written = (end - G).exp() * (U_in @ dS.mT)
        dk = x["k_rstd"] * flat(dk + written - k * k_sum)
        dg = dg - dg.cumsum(2) + dg.sum(2, keepdim=True)
        dg = dg - k * written + (k * written).cumsum(2)
        dg += (S * dS).sum(-1)[:, :, None] * end.exp()
        d_gate = flat(dg * LOWER_BOUND * gate * (1 - gate))
        return {
            "dq": self.round("outputs", dq),
            "dk": self.round("outputs", dk),
            "dv": d_v,
            "dg": self.round("outputs", x["rate"] * d_gate),
            "dbeta": self.round("outputs", flat(du * (1 - beta) / beta)),
            "dA_log": (x["rate"] * d_gate * x["z"]).sum((1, 2)),
            "ddt_bias": (x["rate"] * d_gate).sum(1),
        }


def by(x: Tensor, size: int) -> Tensor:
    """[H, T, ...] -> [H, T / size, size, ...]"""
    return x.unflatten(1, (-1, size))


def flat(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def draw(tokens: int, heads: int, shift: float) -> dict[str, Tensor]:
    """Activated inputs of values that bf16 holds; `shift` is added to the logits of the decay."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float32)

    q, k, v, d_o, g = (normal(heads, tokens, D) for _ in range(5))
    q, k, v, d_o, g = (y.bfloat16().double() for y in (q, k, v, d_o, g + shift))
    x = {"v": v, "d_o": d_o, "beta": normal(heads, tokens, 1).bfloat16().double().sigmoid()}
    x["rate"] = (normal(heads, 1, 1) * 0.5).double().exp()
    x["z"] = g + (normal(heads, 1, D) * 0.5).double()
    x["gate"] = (x["rate"] * x["z"]).sigmoid()
    x["decay"] = LOWER_BOUND * x["gate"]
    for name, y, scale in (("q", q, D**-0.5), ("k", k, 1.0)):
        rstd = (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * scale
        x |= {name: y * rstd, f"{name}_rstd": rstd}
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--shift", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    x = draw(args.tokens, args.heads, args.shift)
    exact = Emulation(frozenset())(x)
    terms = (exact["dg"] * x["z"]).flatten(1).norm(dim=1)

    def report(title: str, *arguments: Any) -> None:
        got = Emulation(*arguments)(x)
        errors = {n: float((got[n] - exact[n]).norm() / exact[n].norm()) for n in OUTPUTS}
        errors["dA_log"] = float(((got["dA_log"] - exact["dA_log"]) / terms).square().mean().sqrt())
        print(f"{title:30s}" + "".join(f" {n} {e * 1e3:4.2f}" for n, e in errors.items()))

    for name, title in ROUNDED.items():
        report(title, frozenset((name,)))
    report("all others together", frozenset(OTHERS))
    report("everything", EVERYTHING)
    for change in ({"diagonal"}, {"wide U"}, {"beta", "wide U"}, CHANGES):
        report(" + ".join(sorted(change)), EVERYTHING, frozenset(change))


if __name__ == "__main__":
    main()
