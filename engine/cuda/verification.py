"""`engine.verification` for all rows at once, on the device: the same laws, the same random numbers.

There a row is looked at only when the drafts before it were accepted. Here every row is decided as if they
had been, side by side, and what lies behind the first that was not is thrown away. Only tokens and how many
drafts were accepted come back, in one small copy; logprobs make a second, where they are asked for. Uniforms
and keys are drawn on the host, a few hundred numbers in microseconds, and go over with the rest: on the
device the rounds of their generator would be hundreds of launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch import BatchItem, DraftBlock, Verdict
from engine.cuda.filters import Filters, coupled_argmax, cut, filtered, softmax
from engine.cuda.laws import law_groups
from engine.cuda.staging import Array, Staging, Writer
from engine.cuda.stream import Stream
from engine.draws import inverse_cdf
from engine.noise import host_row_keys
from engine.outputs import TokenLogprob
from engine.params import SamplingParams
from engine.verification import Run, draw_uniforms, open_runs, undecided

#: in the place of a token that a row did not give: it holds NaN or infinity; nothing but minus infinity
_BROKEN, _EMPTY = -1, -2


class DeviceVerification:
    """Called like `engine.verification.verify`, with logits on the stream's device."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._staging = Staging(stream)

    @torch.inference_mode()
    def __call__(self, items: Sequence[BatchItem], logits: torch.Tensor) -> list[Verdict]:
        """See `engine.verification.verify`. May change rows of items whose parameters change logits."""
        runs = open_runs(items, logits)
        live = [run for run in runs if run.verdict is None]
        rows = [row for run in live for row in range(run.row, run.row + 1 + run.item.verify)]
        if len(rows) < len(logits):  # some were scored, or belong to runs that have ended
            logits, row = logits[rows], 0
            for run in live:
                run.row, row = row, row + 1 + run.item.verify
        if live:
            draw_uniforms(live)
            with self._staging.turn() as writer:
                self._decide(live, logits, writer)
        return [run.verdict for run in runs if run.verdict is not None]

    def _decide(self, live: list[Run], logits: torch.Tensor, writer: Writer) -> None:
        rows = _Rows(live)
        reported = _reported(live)
        logp, chosen = None, None
        if reported:
            (chosen,) = writer.device(_ints(reported))
            # of the model itself, before anything changes the row
            logp = torch.log_softmax(logits[chosen], -1)
        _adjust(live, logits)
        top = logits.amax(-1)
        usable = top.isfinite()
        cells, drafts = writer.device(rows.cells, rows.drafts)
        tokens = drafts.clone()
        if rows.greedy:
            (greedy,) = writer.device(_ints(rows.greedy))
            tokens[greedy] = (logits if len(rows.greedy) == len(logits) else logits[greedy]).argmax(-1)
        if rows.coupled:
            coupled, keys = writer.device(_ints(rows.coupled), rows.keys())
            p = _processed(logits[coupled], [rows.params[i] for i in rows.coupled], writer)
            tokens[coupled] = coupled_argmax(p, keys)
        accepts = (tokens == drafts) & (drafts >= 0) & usable
        rejection = _Rejection(live, rows, logits, drafts, writer) if rows.rejection else None
        if rejection is not None:
            accepts[rejection.rows] &= rejection.accepts
        grid = torch.zeros(len(live) * rows.width, dtype=torch.bool, device=logits.device)
        grid[cells] = accepts
        accepted = grid.view(-1, rows.width).long().cumprod(1).sum(1)
        if rejection is not None:
            last, token = rejection.final(accepted)
            tokens[last] = token
        table = torch.full((len(live) * rows.width,), -1, dtype=torch.int64, device=logits.device)
        table[cells] = torch.where(usable, tokens, torch.where(top == -torch.inf, _EMPTY, _BROKEN))
        answer = torch.cat((accepted[:, None], table.view(-1, rows.width)), 1).to(torch.int32)
        found: list[list[int]] = self.stream.fetch(answer).tolist()
        logprobs = {}
        if logp is not None and chosen is not None:
            logprobs = self._logprobs(live, reported, logp, tokens[chosen])
        for run, (count, *decided) in zip(live, found, strict=True):
            _walk(run, count, decided, logprobs)

    def _logprobs(
        self, live: list[Run], rows: list[int], logp: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, TokenLogprob]:
        """By row: the token that it decided on and the likeliest alternatives; logp [n, V] of these rows."""
        wanted = {
            run.row + slot: run.item.state.params.logprobs or 0
            for run in live
            if _reports(run)
            for slot in range(1 + run.item.verify)
        }
        values, ids = torch.topk(logp, max(wanted.values()))
        own = logp.gather(1, tokens.clamp_min(0)[:, None])
        table = torch.cat((tokens[:, None].double(), own.double(), values.double(), ids.double()), 1)
        found = {}
        for row, (token, value, *rest) in zip(rows, self.stream.fetch(table).tolist(), strict=True):
            half, top = len(rest) // 2, wanted[row]
            pairs = zip(map(int, rest[half : half + top]), rest[:top], strict=True)
            found[row] = (
                TokenLogprob(int(token), value, tuple(pairs)) if top else TokenLogprob(int(token), value)
            )
        return found


def _reports(run: Run) -> bool:
    return run.item.state.params.logprobs is not None


def _reported(live: list[Run]) -> list[int]:
    """Rows of the logits whose log probabilities are asked for."""
    return [row for run in live if _reports(run) for row in range(run.row, run.row + 1 + run.item.verify)]


def _adjust(live: list[Run], logits: torch.Tensor) -> None:
    """Bias, penalties and minimum length, row by row along the drafts, each as if those before were taken."""
    for run in live:
        item = run.item
        if item.state.adjusts:
            state = item.state.fork(logits.device)
            for slot in range(1 + item.verify):
                state.adjust(logits[run.row + slot])
                if slot < item.verify and item.draft is not None:
                    state.advance(item.draft.tokens[slot])


def _walk(run: Run, accepted: int, tokens: list[int], logprobs: dict[int, TokenLogprob]) -> None:
    """Emit up to the first draft that was not accepted, the end of the text, or a row without any."""
    for slot in range(accepted + 1):
        if tokens[slot] < 0:
            run.close(undecided(run, tokens[slot] == _EMPTY))
        else:
            run.emit(tokens[slot], slot < accepted, logprobs.get(run.row + slot))
        if run.verdict is not None:
            return


@dataclass(slots=True)
class _Rows:
    """Which rows of the logits are decided how. `cells`: places in a table of a line a run, `width` wide."""

    live: list[Run]
    width: int = field(init=False)
    cells: Array = field(init=False)
    drafts: Array = field(init=False)  # -1: none
    params: list[SamplingParams] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    coupled: list[int] = field(default_factory=list)
    rejection: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.width = 1 + max(run.item.verify for run in self.live)
        cells: list[int] = []
        drafts: list[int] = []
        for line, run in enumerate(self.live):
            item, params = run.item, run.item.state.params
            count = 1 + item.verify
            kind = self.greedy if params.greedy else self.rejection if params.seed is None else self.coupled
            kind += range(run.row, run.row + count)
            cells += range(line * self.width, line * self.width + count)
            drafts += (*item.draft.tokens[: item.verify], -1) if item.draft is not None else (-1,)
            self.params += [params] * count
        self.cells, self.drafts = _ints(cells), _ints(drafts)

    def keys(self) -> Array:
        """Of the coupled rows [n, 2] int32."""
        rows = [
            (run.item.state.params.seed or 0, run.item.state.choice, run.item.anchor + 1 + slot)
            for run in self.live
            if run.item.state.params.seed is not None and not run.item.state.params.greedy
            for slot in range(1 + run.item.verify)
        ]
        seeds, choices, positions = zip(*rows, strict=True)
        return np.array(host_row_keys(seeds, choices, positions), dtype=np.uint32).view(np.int32)


class _Rejection:
    """Rejection sampling of m rows: which drafts are accepted, then one draw for each run."""

    def __init__(
        self, live: list[Run], rows: _Rows, logits: torch.Tensor, drafts: torch.Tensor, writer: Writer
    ) -> None:
        mine = [(line, run) for line, run in enumerate(live) if run.accept_u is not None]
        firsts = _firsts([1 + run.item.verify for _, run in mine])
        counts = [(run, 1 + run.item.verify) for _, run in mine]
        accept = [u for run, count in counts for u in (run.accept_u or [])[:count]]
        final = [u for run, count in counts for u in (run.final_u or [])[:count]]
        self.rows, self.lines, self.firsts, self.verify, accept_u, self.final_u = writer.device(
            _ints(rows.rejection),
            _ints([line for line, _ in mine]),
            _ints(firsts),
            _ints([run.item.verify for _, run in mine]),
            np.array(accept),
            np.array(final),
        )
        self.p = _processed(logits[self.rows], [rows.params[i] for i in rows.rejection], writer)
        self.drafts = drafts[self.rows].clamp_min(0)
        blocks: list[tuple[int, int, DraftBlock, int]] = []
        for number, (first, (_, run)) in enumerate(zip(firsts, mine, strict=True)):
            if run.item.draft is not None:
                blocks.append((number, first, run.item.draft, run.item.verify))
        q = torch.ones(len(self.p), dtype=torch.float64, device=logits.device)
        self.groups = []
        for group in law_groups(blocks):
            at, *indices = writer.device(*map(_ints, (group.at, group.runs, group.begins, group.lasts)))
            laws = group.joined(logits.device)
            q[at] = group.chances(laws, self.drafts[at], logits.shape[-1]).double()
            self.groups.append((group, laws, indices))
        p_x = self.p.gather(1, self.drafts[:, None])[:, 0].double()
        self.accepts = accept_u * q < p_x

    def final(self, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows at which runs end, given how many drafts of all runs were accepted; their tokens."""
        done = accepted[self.lines]
        at = self.firsts + done
        rejected = (done < self.verify)[:, None]
        p, drafts = self.p[at], self.drafts[at][:, None]
        rest = p.scatter(1, drafts, torch.where(rejected, 0.0, p.gather(1, drafts)))
        for group, laws, (runs, begins, lasts) in self.groups:
            own = torch.minimum(begins + done[runs], lasts)
            left = (p[runs] - group.whole(laws[own], p.shape[-1])).clamp_min(0.0)
            rest[runs] = torch.where(rejected[runs], left, p[runs]).to(p.dtype)
        # If rounding left nothing, p equals q and is right itself.
        weights = torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, p)
        return self.rows[at], inverse_cdf(weights, self.final_u[at])


def _processed(logits: torch.Tensor, params: list[SamplingParams], writer: Writer) -> torch.Tensor:
    """Each row's own distribution [n, V]: temperature, then filters where there are some."""
    temperature, top_k, top_p, min_p = writer.device(*Filters.arrays(params))
    p = softmax(logits, temperature)
    few = [i for i, each in enumerate(params) if filtered(each)]
    if few:
        ks = [params[i].top_k for i in few]
        most = max(ks) if min(ks) > 0 else None
        (at,) = writer.device(_ints(few))
        p[at] = cut(p[at], Filters(temperature[at], top_k[at], top_p[at], min_p[at], most))
    return p


def _firsts(counts: list[int]) -> list[int]:
    out: list[int] = (np.cumsum(counts) - counts).tolist()
    return out


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)
