# SPDX-License-Identifier: Apache-2.0
"""What determines a request's KV: tokens, and adapters and media by their content, whatever their names."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_fakes import TOKENS, prompt

from kvcached_nixl.vllm.adapter import requests
from kvcached_nixl.vllm.adapter.requests import RequestReader, RequestView
from kvcached_nixl.wire.manifest import digest_of
from kvcached_nixl.wire.question import Question

IMAGE_TOKEN = 7


def reader(*, is_multimodal: bool = True, lora_config: Any = None, **hf_config: Any) -> RequestReader:
    model = SimpleNamespace(is_multimodal_model=is_multimodal, hf_config=SimpleNamespace(to_dict=lambda: hf_config))
    return RequestReader(SimpleNamespace(model_config=model, lora_config=lora_config))


def view(reads: RequestReader | None = None, **fields: Any) -> RequestView:
    made: dict[str, Any] = {
        "request_id": "r",
        "num_prompt_tokens": TOKENS,
        "kv_transfer_params": None,
        "prompt_token_ids": prompt(),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "abort_immediately": False,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
        "resumable": False,
        "trace_headers": None,
        "structured_output_request": None,
    }
    return (reads or reader())(SimpleNamespace(**made | fields))


def image(name: str = "i", offset: int = 2, length: int = 3, mm_hash: str | None = None) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_hash=mm_hash, mm_position=place)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_folder", lambda path, _: path)


def adapter(folder: Path, weights: bytes = b"a" * 100, **configuration: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 8, "base_model_name_or_path": str(folder)} | configuration)
    )
    (folder / "adapter_model.bin").write_bytes(weights)
    return folder


def lora(path: Path, number: int = 1, name: str = "l") -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), lora_name=name, is_3d_lora_weight=False)


def test_its_digest_has_all_that_its_kv_follows_from(tmp_path: Path) -> None:
    """And is that of its first tokens, so a longer prompt has a shorter one's."""
    plain = view()
    assert plain.digest(8) == digest_of(prompt(), 8)
    assert view(prompt_token_ids=[*prompt(), 1, 2]).digest(8) == plain.digest(8)
    others = [
        view(mm_features=[image()]),
        view(mm_features=[image("j")]),
        view(mm_features=[image(offset=3)]),
        view(mm_features=[image(length=4)]),
        view(lora_request=lora(adapter(tmp_path / "a"))),
        view(cache_salt="l"),
    ]
    found = {one.digest(8) for one in others}
    assert len(found) == len(others) and plain.digest(8) not in found
    assert view(mm_features=[image(offset=8)]).digest(8) == plain.digest(8)
    assert view(mm_features=[image()], cache_salt="s").digest(8) == digest_of(
        prompt(), 8, features=[("i", 2, 3)], salt="s"
    )


def test_media_are_named_without_an_adapters_name() -> None:
    assert view(mm_features=[image("l:i", mm_hash="i")]).digest(8) == view(mm_features=[image("i")]).digest(8)


def test_a_prompt_of_embeddings_is_told_apart() -> None:
    """Also where it has no token ids, and in a type that numpy does not know."""
    torch = pytest.importorskip("torch")
    embeds = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    found = view(prompt_token_ids=None, prompt_embeds=embeds)
    other = embeds.clone()
    other[3, 1] = 0
    assert view(prompt_token_ids=None, prompt_embeds=other).digest(3) == found.digest(3)
    assert view(prompt_token_ids=None, prompt_embeds=other).digest(4) != found.digest(4)
    wider = view(prompt_token_ids=None, prompt_embeds=embeds.to(torch.float16))
    assert wider.digest(4) != found.digest(4)


def test_where_embeddings_stand_among_tokens_is_told_apart() -> None:
    """Which positions are which was not in the digest."""
    torch = pytest.importorskip("torch")
    embeds = torch.zeros((TOKENS, 2))
    masks = [[False] * TOKENS, [True] * TOKENS, [True, *[False] * (TOKENS - 1)]]
    found = {view(prompt_embeds=embeds, prompt_is_token_ids=mask).digest(8) for mask in [None, *masks]}
    assert len(found) == 4
    late = [False] * 8 + [True] * (TOKENS - 8)
    assert view(prompt_embeds=embeds, prompt_is_token_ids=late).digest(8) == view(
        prompt_embeds=embeds, prompt_is_token_ids=masks[0]
    ).digest(8)


# ------------------------------------------------------------------------------------------------------------ adapters


def test_an_adapter_is_what_it_holds_under_whatever_name(tmp_path: Path) -> None:
    """The same name, other adapters, and the reverse."""
    one, same = adapter(tmp_path / "one"), adapter(tmp_path / "elsewhere" / "same")
    other, scaled = adapter(tmp_path / "other", b"b" * 100), adapter(tmp_path / "scaled", lora_alpha=64)
    found = [view(lora_request=lora(path)).digest(8) for path in (one, same, other, scaled)]
    assert found[0] == found[1] and len(set(found)) == 3
    reads = reader()
    assert view(reads, lora_request=lora(one, 1, "a")).digest(8) == view(reads, lora_request=lora(same, 2, "b")).digest(
        8
    )


def test_an_adapter_whose_files_were_replaced_is_like_no_other_until_it_is_loaded_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers may have read either."""
    path, reads = adapter(tmp_path / "one"), reader()
    before = view(reads, lora_request=lora(path)).digest(8)
    path.rename(tmp_path / "first")
    adapter(path, b"c" * 101)
    with caplog.at_level(logging.WARNING):
        found = {view(reads, lora_request=lora(path)).digest(8) for _ in range(3)}
    assert len(found) == 3 and before not in found and caplog.text.count("have been replaced") == 1
    # A worker may have read the others meanwhile, and reads these no more.
    path.rename(tmp_path / "second")
    (tmp_path / "first").rename(path)
    assert view(reads, lora_request=lora(path)).digest(8) != before
    adapter(path, b"c" * 101)
    reads.adapters.forget(1)
    after = view(reads, lora_request=lora(path)).digest(8)
    assert after == view(reader(), lora_request=lora(path)).digest(8) != before


def test_a_hub_s_newer_revision_is_another_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reads an adapter again asks the hub, which has a newer one; what was seen before asks none."""
    folders = {"now": adapter(tmp_path / "first")}
    asked = []

    def folder(path: str, is_new: bool) -> str:
        asked.append(is_new)
        return str(folders["now"])

    monkeypatch.setattr(requests, "_folder", folder)
    reads = reader()
    before = view(reads, lora_request=lora(Path("org/a"))).digest(8)
    assert view(reads, lora_request=lora(Path("org/a"))).digest(8) == before and asked == [True, False]
    folders["now"] = adapter(tmp_path / "second")
    assert view(reads, lora_request=lora(Path("org/a"))).digest(8) != before


def test_an_adapter_that_could_not_be_loaded_anew_is_like_no_other(tmp_path: Path) -> None:
    """Whatever lies in its folder, its predecessor may be what computes."""
    path, reads = adapter(tmp_path / "one"), reader()
    view(reads, lora_request=lora(path)).digest(8)
    adapter(path, b"c" * 101)
    reads.adapters.forget(1)
    reads.adapter_arrives(lora(path))
    reads.adapters.doubt(1, "it could not be loaded")
    assert not reads.is_loaded(lora(path))
    assert view(reads, lora_request=lora(path)).digest(8) != view(reads, lora_request=lora(path)).digest(8)
    reads.adapters.forget(1)
    assert view(reads, lora_request=lora(path)).digest(8) == view(reader(), lora_request=lora(path)).digest(8)


def test_an_adapter_that_cannot_be_read_for_a_moment_is_doubted_only_if_it_was_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that fails once: what was known before is compared with what is there afterwards."""
    path, fails = adapter(tmp_path / "one"), [False]

    def folder(found: str, _: bool) -> str:
        if fails[0]:
            raise OSError("stale file handle")
        return found

    monkeypatch.setattr(requests, "_folder", folder)
    reads, known = reader(), Path("org/known")
    monkeypatch.chdir(tmp_path)
    known.parent.mkdir()
    known.symlink_to(path)
    before = view(reads, lora_request=lora(known, 1)).digest(8)
    fails[0] = True
    found = {view(reads, lora_request=lora(known, 1)).digest(8) for _ in range(2)}
    assert before not in found and len(found) == 2 and caplog.text.count("stale file handle") == 1
    view(reads, lora_request=lora(path, 2)).digest(8)
    fails[0] = False
    assert view(reads, lora_request=lora(known, 1)).digest(8) == before
    assert view(reads, lora_request=lora(path, 2)).digest(8) != before


def test_adapters_that_are_applied_in_other_ways_are_others(tmp_path: Path) -> None:
    path, found = adapter(tmp_path / "one"), []
    for changed in (
        {},
        {"target_modules": ["q_proj"]},
        {"lora_dtype": "float32"},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
    ):
        settings = {"lora_dtype": "auto", "target_modules": None, "enable_tower_connector_lora": False} | changed
        found.append(view(reader(lora_config=SimpleNamespace(**settings)), lora_request=lora(path)).digest(8))
    fused = lora(path)
    fused.is_3d_lora_weight = True
    found.append(view(lora_request=fused).digest(8))
    assert len(set(found)) == len(found)


def test_a_name_that_means_an_unknown_adapter_is_told_once(tmp_path: Path) -> None:
    """Else each of its requests would clear the prefix cache again."""
    reads, path = reader(), adapter(tmp_path / "one")
    reads.adapter_arrives(lora(path))
    reads.adapters.doubt(1, "it could not be loaded")
    found = []
    for _ in range(3):
        reads.adapter_arrives(lora(path))
        found.append(reads.take_renamed())
    assert found == [{lora(path).lora_name}, set(), set()]


def test_a_name_is_given_to_another_adapter_by_whoever_arrives_and_not_by_whoever_ends(tmp_path: Path) -> None:
    """Else the digests of the last requests of one would have the next one of the other begin anew."""
    reads = reader()
    paths = [adapter(tmp_path / "one"), adapter(tmp_path / "two", b"t" * 100)]
    found = []
    for number, path in enumerate([*paths, paths[1]], 1):
        reads.adapter_arrives(lora(path, number))
        found.append(reads.take_renamed())
        view(reads, lora_request=lora(paths[0], 1)).digest(8)
    reads.adapter_arrives(None)
    assert found == [set(), {lora(path).lora_name}, set()] and not reads.take_renamed()


def test_an_adapter_that_may_have_been_loaded_by_others_is_like_no_other_until_it_is_loaded_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A collective RPC: whatever it has loaded under whatever number, its files may be other ones since."""
    path, reads = adapter(tmp_path / "one"), reader()
    before = view(reads, lora_request=lora(path)).digest(8)
    reads.adapters.forget(None)
    with caplog.at_level(logging.WARNING):
        found = {view(reads, lora_request=lora(path, number)).digest(8) for number in (1, 2, 1, 2)}
    assert len(found) == 4 and before not in found and caplog.text.count("a collective RPC may have") == 2
    reads.adapters.forget(2)
    assert view(reads, lora_request=lora(path, 2)).digest(8) == before
    assert view(reads, lora_request=lora(path, 1)).digest(8) != before


@pytest.mark.parametrize("what", ["nothing", "weights", "configuration"])
def test_an_adapter_that_cannot_be_read_is_like_no_other(tmp_path: Path, what: str) -> None:
    path = adapter(tmp_path / "one")
    if what == "weights":
        (path / "adapter_config.json").unlink()
    elif what == "configuration":
        (path / "adapter_model.bin").unlink()
    else:
        path = tmp_path / "gone"
    reads = reader()
    assert view(reads, lora_request=lora(path)).digest(8) != view(reads, lora_request=lora(path)).digest(8)


# --------------------------------------------------------------------------------------------------------------- media


def test_placeholders_without_media_are_found() -> None:
    """Dynamo 1.5 gives decode the expanded tokens of images, and no images."""
    reads = reader(thinker_config={"image_token_id": IMAGE_TOKEN}, video_token_index="none")
    expanded = [1, 2, IMAGE_TOKEN, IMAGE_TOKEN, 3]
    assert view(reads, prompt_token_ids=expanded).lacks_media
    assert not view(reads, prompt_token_ids=expanded, mm_features=[image(offset=2, length=2)]).lacks_media
    assert view(reads, prompt_token_ids=expanded, mm_features=[image(offset=2, length=1)]).lacks_media
    assert not view(reads, prompt_token_ids=[1, 2, 3]).lacks_media
    assert not view(reads, prompt_token_ids=None).lacks_media
    unknown = reader(what_stands_for_images=IMAGE_TOKEN)
    assert view(unknown, prompt_token_ids=[1]).lacks_media, "nobody knows"
    assert not view(unknown, prompt_token_ids=[1], mm_features=[image()]).lacks_media
    assert not view(reader(is_multimodal=False, image_token_id=1), prompt_token_ids=expanded).lacks_media


def asked_for(**fields: Any) -> RequestView:
    made = {"sampling_params": object(), "priority": 0, "trace_headers": None, "block_hashes": []}
    return view(**made | fields)


def test_what_a_prefill_server_is_asked() -> None:
    lora_request = SimpleNamespace(lora_name="l", lora_int_id=1)
    headers = {"traceparent": "00-1-2-01"}
    found = asked_for(lora_request=lora_request, cache_salt="s", priority=3, trace_headers=headers).question
    assert found == Question("r", prompt(), "l", "s", 3, headers)
    assert asked_for().question == Question("r", prompt())
    assert asked_for(kv_transfer_params={"prefix_prompt_ids": [1]}).question is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
        {"abort_immediately": True},
        {"mm_features": [SimpleNamespace(data=None)]},
        {"sampling_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {"do_remote_prefill": []}},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
    ids=str,
)
def test_what_nobody_is_asked_for(fields: dict[str, Any]) -> None:
    assert asked_for(**fields).question is None


def test_a_prompt_is_known_by_the_hashes_of_its_full_blocks() -> None:
    found = view(block_hashes=[b"a", b"b"])
    hashes = found.block_hashes
    found.request.block_hashes.append(b"of what it generates")
    assert hashes == (b"a", b"b")


@pytest.mark.parametrize(
    ("params", "is_named"),
    [
        *(({"do_remote_prefill": said, "remote_host": "evil"}, True) for said in (True, 1, [], {}, "")),
        *(({"do_remote_prefill": said, "do_remote_decode": True}, False) for said in (False, 0, None)),
        (None, False),
    ],
    ids=str,
)
def test_a_server_that_a_client_names_is_forgotten(
    params: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = view(kv_transfer_params=params)
    with caplog.at_level(logging.WARNING, "vllm.kvcached_nixl"):
        found.refuse_prefill()
    assert found.params == (None if is_named else params)
    assert ("accept_kv_transfer_params" in caplog.text) is is_named


@pytest.mark.parametrize("awaits", [False, True])
def test_a_grammar_is_awaited_until_it_is_compiled(awaits: bool) -> None:
    """Also until it could not be compiled; vLLM says then why."""
    grammar: Future[Any] = Future()
    found = view(structured_output_request=SimpleNamespace(_grammar=grammar))
    assert found.awaits_grammar
    grammar.set_exception(ValueError("no grammar"))
    assert not found.awaits_grammar and not view().awaits_grammar
    assert (
        view(structured_output_request=SimpleNamespace(_grammar=None if awaits else "compiled")).awaits_grammar
        is awaits
    )
