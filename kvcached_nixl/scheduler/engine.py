# SPDX-License-Identifier: Apache-2.0
"""What this package needs from vLLM's scheduler. No torch.

`adapter.requests` and `patches.engine_blocks` implement these protocols (`tests/unit/scheduler/test_facade.py`
compares). Their attributes are properties there: nobody here sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvcached_nixl.wire.headroom import BlockUsage
from kvcached_nixl.wire.question import Question
from kvcached_nixl.wire.step import BlockIds


class Request(Protocol):
    """One request in vLLM's scheduler.

    Attributes:
        params: its ``kv_transfer_params``, unchecked, as a client or router has sent them.
        whole_because: why prefill computes it to its last token, which no state can be taken back from; "" if it does
            not. Asked only of requests of prefill, where layers keep states.
        ends_in_media: its prompt's last token belongs to an image, a sound, ...
        is_session: more input may follow after what it has generated: its prompt is then not its whole input.
        awaits_grammar: vLLM begins it when the grammar of its structured output is compiled.
        is_stand_in: vLLM added it in place of a rejected request: its prompt is not known, and it is aborted at once.
        computes_prompt: it needs an output for each token of its prompt, so that must be computed here in full.
        adapter: the engine's number of the LoRA adapter that it is computed with; 0 for none.
        num_media: images, sounds, ... in its prompt.
        lacks_media: its prompt has placeholders for images, sounds, ... that did not come with the request.
        trace_headers: the W3C trace context as its client or router has sent it, unchecked. None without tracing.
        priority: less is started earlier, where the engine goes by priority.
        block_hashes: what its full blocks are cached under: each stands for all tokens up to its end, adapter, media
            and salt.
        question: what a prefill server would be asked; None if it cannot be asked for this prompt.
    """

    request_id: str
    num_prompt_tokens: int
    params: Mapping[str, Any] | None
    whole_because: str
    ends_in_media: bool
    is_session: bool
    awaits_grammar: bool
    is_stand_in: bool
    computes_prompt: bool
    adapter: int
    num_media: int
    lacks_media: bool
    trace_headers: Mapping[str, str] | None
    priority: int
    block_hashes: Sequence[bytes]
    question: Question | None

    def refuse_prefill(self) -> None:
        """Forgets the prefill server that a client names in its parameters."""

    def tell_cached(self, num_tokens: int) -> None:
        """Lets its client's ``usage`` name these as the prompt's cached tokens, or those that were cached here, if more
        were: of what is handed over, prefill had these cached. Until its first output."""

    def digest(self, num_tokens: int) -> str:
        """Digest of its first ``num_tokens`` tokens (`wire.manifest`)."""


class Reader(Protocol):
    """Reads vLLM's requests, and identifies LoRA adapters by their content."""

    def __call__(self, request: Any) -> Any:
        """Wraps vLLM's request object: returns a `Request`."""

    def take_renamed(self) -> Collection[str]:
        """Names of adapters under which another adapter has arrived than before, since the last call."""

    def forget(self, adapter: int | None) -> None:
        """A LoRA adapter was loaded again or removed. None: any adapter may have been, and it is not known which."""


class Progress(NamedTuple):
    """A request in a step: its blocks in addition to (``replaces``: instead of) the earlier ones, and its number of
    computed tokens when the step has ended (``num_computed_tokens``) and when it begins (``begin_token``)."""

    request_id: str
    block_ids: BlockIds
    replaces: bool
    num_computed_tokens: int
    begin_token: int = 0


class BlockPool(Protocol):
    """The KV-cache blocks of an engine.

    Attributes:
        are_shared: another connector may load KV into them, and may later report that the load has failed.
        is_copied: another connector is reading blocks or writing them: those that are freed meanwhile are not free.
        is_producer: the engine only offers KV (``kv_role`` kv_producer), so that vLLM orders no loads into them.
        is_paused: the engine runs nothing.
        admits: the engine starts requests now: it is neither paused nor asleep.
        most_running: how many requests may run at a time.
        caches_prefixes: there is a prefix cache.
        goes_by_priority: requests are started by priority, and not as they arrived.
        num_free: blocks that could be allocated now, those that only the prefix cache keeps among them.
        num_used: blocks that requests have, or that are kept or held for peers.
        num_running_blocks: those of the requests that run.
        num_cached: blocks that only the prefix cache keeps, and that `drop_cached` could free; 0 without kvcached.
        blocks_over_limit: how many more blocks are allocated than kvcached's limit (``kvctl limit``) allows.
        has_reserve: kvcached has mapped pages in advance, which `trim` would give back.
        stalled: if no request runs: those that wait for blocks, in vLLM's order. No running request will free any.
        starved: the next request in the queue, and how many more blocks it needs than are free; None if it needs none.
    """

    are_shared: bool
    is_copied: bool
    is_producer: bool
    is_paused: bool
    admits: bool
    most_running: int
    caches_prefixes: bool
    goes_by_priority: bool
    num_free: int
    num_used: int
    num_running_blocks: int
    num_cached: int
    blocks_over_limit: int
    has_reserve: bool
    stalled: list[str]
    starved: tuple[str, int] | None

    def num_needed(self, request_id: str) -> int:
        """How many blocks a request needs for its prompt, in addition to those that it has."""

    def num_cached_tokens(self, request_id: str) -> int:
        """How many tokens of a request's prompt are in the prefix cache."""

    def hold(self, request_id: str) -> None:
        """Has a request that waits in vLLM's queue wait there until `release`, and no step look at it."""

    def release(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """Has a held request started when it is its turn, with ``kv_transfer_params`` of prefill if there are any."""

    def limit_chunks(self, num_tokens: int) -> None:
        """Limits how many tokens of one prompt a step computes while other requests run; 0 for no limit but vLLM's."""

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        """Whether any request but these has blocks: it waits for KV or for input, or is kept for a peer."""

    def usage(self) -> BlockUsage:
        """Numbers at this moment. May be called from any thread."""

    def mapped_bytes(self) -> int:
        """Memory of one device that is mapped for KV, with the reserve of free pages. May be called from any thread."""

    def apply_limit(self) -> None:
        """Has kvcached look at its limit (``kvctl limit``), which it does only when it allocates."""

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        """Tells the other engines on the device how much memory `starved` waits for. Returns whether it is any.

        Args:
            needs_others: whether a request would not run with that memory, but wait for another engine.
        """

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        """How many blocks would have to be freed for other engines on the device that wait for memory, and whether one
        of them runs nothing until it gets some."""

    def neighbours_served(self) -> None:
        """What `wanted_by_neighbours` has returned is being freed."""

    def drop_cached(self, num_blocks: int) -> int:
        """Frees blocks that only the prefix cache keeps. Returns how many."""

    def trim(self) -> int:
        """Gives the device back what kvcached has mapped in advance. Returns how many blocks would have fitted."""

    def take(self, request_id: str) -> list[Any]:
        """Takes a request's blocks from it without freeing them; vLLM finds none when it frees the request."""

    def give_back(self, blocks: list[Any]) -> None:
        """Frees blocks that `take` returned."""

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        """Takes the received KV from a request that vLLM has not resumed yet. Called between two steps.

        Args:
            recomputes: the request is recomputed; else it ends with an error.

        Returns: the index of its client if the request has ended; the client has to be told.
        """

    def outdate(self, is_meant: Callable[[int, str], bool], *, even_waiting: bool = False) -> Collection[str]:
        """Takes KV that was computed so far out of the prefix cache, and has the requests that have blocks now share
        none of what they go on to compute. Called between two steps.

        Args:
            is_meant: whether KV of this LoRA adapter is outdated: vLLM's number and name of it, 0 and "" for none.
            even_waiting: requests without blocks share nothing with later ones either.

        Returns: the requests that are meant and have blocks.
        """

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Per KV-cache group, the first token whose block is kept after ``num_tokens`` tokens; it starts a block."""
