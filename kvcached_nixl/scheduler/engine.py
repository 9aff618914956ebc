# SPDX-License-Identifier: Apache-2.0
"""What is asked of vLLM's scheduler; ``compat.actions.engine`` answers. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from kvcached_nixl.wire.step import BlockIds

__all__ = ["Blocks", "Progress", "Reader", "Request"]


class Request(Protocol):
    """A request of vLLM's."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def params(self) -> Mapping[str, Any] | None:
        """Its ``kv_transfer_params``, as a client or router has sent them."""
        ...

    @property
    def is_session(self) -> bool:
        """More input may come for it, behind what it has generated: its prompt is not all that it will have."""
        ...

    @property
    def is_stand_in(self) -> bool:
        """It stands for a request that was rejected, whose prompt nobody knows here, and is aborted at once."""
        ...

    @property
    def computes_prompt(self) -> bool:
        """It wants something of each token of its prompt, so it may read none of their KV from anywhere."""
        ...

    @property
    def adapter(self) -> int:
        """The engine's own number of the LoRA adapter that it is computed with; 0 for none."""
        ...

    @property
    def num_media(self) -> int:
        """Images, sounds, ... of its prompt."""
        ...

    @property
    def lacks_media(self) -> bool:
        """Whether its prompt has placeholders of images, sounds, ... that it has not."""
        ...

    def digest(self, num_tokens: int) -> str:
        """Of its first tokens, as `wire.digest` makes it."""
        ...


class Reader(Protocol):
    """How an engine's requests are read; knows what LoRA adapters hold."""

    def __call__(self, request: Any) -> Request:
        """Of vLLM's own request."""
        ...

    def take_renamed(self) -> bool:
        """Whether, since the last call, a name of an adapter has come to mean another one."""
        ...

    def adapter_of(self, lora_request: Any) -> str:
        """What the LoRA adapter of a request holds, known from the first time on; asked before it is loaded."""
        ...

    def loaded(self, adapter: int) -> None:
        """All workers have loaded a LoRA adapter anew, with no request."""
        ...

    def is_loaded(self, lora_request: Any) -> bool:
        """Whether what its files hold was loaded anew, so that its requests need not load it again."""
        ...

    def doubt(self, adapter: int) -> None:
        """A LoRA adapter could not be loaded, on one worker at least: what is loaded is not known."""
        ...

    def forget(self, adapter: int | None) -> None:
        """A LoRA adapter is loaded anew, or gone; None: that may be so of any, and nobody says of which."""
        ...


class Progress(NamedTuple):
    """A request in a step: its blocks beside (or instead of) the earlier ones, its tokens when the step has ended, and
    when it begins."""

    request_id: str
    block_ids: BlockIds
    replaces: bool
    num_computed_tokens: int
    begin_token: int = 0


class Blocks(Protocol):
    """The KV-cache blocks of an engine."""

    @property
    def are_shared(self) -> bool:
        """Whether another connector may load KV into them, which may turn out to be no good."""
        ...

    @property
    def stalled(self) -> str | None:
        """The request that is next, if none runs: it waits for blocks, and no other one will free any."""
        ...

    def take(self, request_id: str) -> list[Any]:
        """Take a request's blocks away from it without freeing them; vLLM finds none when it frees the request."""
        ...

    def give_back(self, blocks: list[Any]) -> None:
        """Free what was taken."""
        ...

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        """A request whose KV has come, and of which nothing is computed yet, has lost it between two steps.

        Args:
            recomputes: it is computed anew; else it ends with an error.

        Returns: its client, which has to be told of its end.
        """
        ...

    def forget_prefixes(self) -> bool:
        """Let no request begin with what others have computed. Returns whether nothing is left of it."""
        ...

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Per KV-cache group, the first token whose block is kept when so many are computed; it starts a block."""
        ...
