# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of its weights: whole memory, what was loaded, files; and what it no longer knows after a change.

Models of plain modules, changed as vLLM's kernels, trainers and worker extensions change them.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from unit.identity.test_files import safetensors  # noqa: E402

from kvcached_nixl.identity.files import checksum_of  # noqa: E402
from kvcached_nixl.identity.history import joined  # noqa: E402
from kvcached_nixl.vllm.adapter.computes import held_by  # noqa: E402
from kvcached_nixl.vllm.adapter.locate import LOADER_BASE  # noqa: E402
from kvcached_nixl.vllm.adapter.weights import (  # noqa: E402
    _computes_by,
    _history,
    _reading,
    note_files,
    watch_loading,
)
from kvcached_nixl.wire.handshake import Weights  # noqa: E402


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.quant_method = SimpleNamespace(config=None)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(3)
        self.experts = Experts()
        self.unused = torch.nn.Parameter(torch.empty(3))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.workspace = torch.empty(5)
        self.topk_indices_buffer = torch.zeros(4, dtype=torch.int32)
        self.attention = SimpleNamespace(_topk_indices_buffer=self.topk_indices_buffer)


Rewrites = Callable[[Model], object]


def nothing(_: Model) -> None: ...


def hides_in_a_kernel(model: Model) -> None:
    """As MXFP4: the parameter goes, an object of the kernel keeps its tensor."""
    weight = model.experts.weight.data.clone()
    del model.experts.weight
    model.experts.quant_method.config = SimpleNamespace(scales=[weight * 2])


def hides_in_a_closure(model: Model) -> None:
    weight = model.experts.weight.data.clone()
    model.experts.weight = torch.nn.Parameter(torch.empty(0))
    model.experts.multiply = lambda x: x @ weight


def hides_out_of_sight(model: Model) -> None:
    """As a kernel in C++."""
    model.experts.weight = torch.nn.Parameter(torch.empty(0))


def hides_in_cpu_memory(model: Model) -> None:
    """As vLLM's CPU kernels, which tell what they keep."""
    weight = model.experts.weight.data.clone()
    model.experts.weight = torch.nn.Parameter(torch.empty(0))
    model.experts.cpu_linear = lambda x, _weight, _bias: x @ weight.t()


def shuffles(model: Model) -> None:
    model.experts.weight.data = model.experts.weight.data.flip(1).contiguous()


class Base:
    """vLLM's: ``load_model`` calls ``load_weights``, then has kernels rewrite what was loaded."""

    __module__ = LOADER_BASE.module

    def __init__(self, config: Any, values: float, rewrites: Rewrites, files: list[Path]) -> None:
        self.load_config, self._values, self._rewrites, self._files = config, values, rewrites, files
        watch_loading(self)

    def load_model(self, model_config: Any) -> Model:
        model = Model()
        # Memory that is not written yet holds anything.
        for memory in (model.angles, model.workspace, model.unused.data):
            memory.normal_()
        self.load_weights(model, model_config)
        self._rewrites(model)
        return model

    def load_weights(self, model: Model, model_config: Any) -> None:
        if self._files:
            note_files(self, [str(one) for one in self._files])
        model.experts.weight.data.fill_(self._values)


class Loader(Base):
    """vLLM's default one."""

    __module__ = "vllm.default_loader"


@dataclass
class Worker:
    model: Model
    config: Any

    def weights(self, *called: str, moves: bool = False) -> Weights:
        history = _history(self.model)
        history.called(called)
        return joined({"": history.now(_reading(self.model, moves))}, "0 of 1", "")[0]


def worker(
    values: float = 1.0, rewrites: Rewrites = nothing, files: tuple[Path, ...] = (), kind: type[Base] = Loader
) -> Worker:
    config = SimpleNamespace()
    found = Worker(kind(config, values, rewrites, list(files)).load_model(SimpleNamespace(model="m")), config)
    # The first forward passes of a start.
    found.model.angles.fill_(7)
    found.model.workspace.normal_()
    return found


@pytest.mark.parametrize(
    "rewrites",
    [nothing, hides_in_a_kernel, hides_in_a_closure, hides_out_of_sight, hides_in_cpu_memory, shuffles],
)
def test_equal_weights_fit_and_others_do_not_whatever_kernels_make_of_them(rewrites: Rewrites) -> None:
    """Without files, as from an object store."""
    one = worker(rewrites=rewrites).weights()
    assert one.misfit(worker(rewrites=rewrites).weights()) == ""
    assert one.misfit(worker(2.0, rewrites).weights()), "experts alone differ"


def test_kernels_may_differ() -> None:
    for rewrites in (shuffles, hides_in_a_kernel, hides_out_of_sight, hides_in_cpu_memory):
        assert worker().weights().misfit(worker(rewrites=rewrites).weights()) == ""
        assert worker().weights().misfit(worker(2.0, rewrites).weights())


def test_rows_that_no_checkpoint_fills_are_equal_everywhere() -> None:
    """As K and V of a layer that uses those of another one."""

    class Part(Model):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Parameter(torch.empty(64, 3))

    class PartLoader(Loader):
        def load_model(self, model_config: Any) -> Model:
            model = Part()
            self.load_weights(model, model_config)
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            model.qkv.data[:32] = 5
            # Others' memory, which is written only from here on.
            kept = torch.full((4, 3), 2.0)
            torch.empty(2, 3, out=kept[:2])
            assert (kept == 2).all()

    found = []
    for left in (7.0, 8.0):
        # Freed memory is given out again as it is.
        [torch.full((64, 3), left) for _ in range(64)].clear()
        found.append(worker(kind=PartLoader))
    assert [one.model.qkv[32:].abs().max().item() for one in found] == [0, 0]
    assert found[0].weights().misfit(found[1].weights()) == ""


def test_memory_is_zeroed_only_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated to load weights is written in full, and may be as large as they are."""
    zeroed: list[int] = []
    fill = torch.UntypedStorage.fill_

    def fills(storage: Any, value: int) -> Any:
        zeroed.append(storage.nbytes())
        return fill(storage, value)

    class Counted(Loader):
        def load_model(self, model_config: Any) -> Model:
            torch.empty(31)
            return super().load_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            torch.empty(37)
            super().load_weights(model, model_config)

    monkeypatch.setattr(torch.UntypedStorage, "fill_", fills)
    worker(kind=Counted)
    torch.empty(41)
    assert 4 * 31 in zeroed and not {4 * 37, 4 * 41} & {*zeroed}


def plain_norm(model: Model) -> None:
    weight = model.norm.weight.data
    del model.norm.weight
    model.norm.weight = weight


def in_place(model: Model) -> None:
    model.norm.weight.data += 1


def adds_a_tensor(model: Model) -> None:
    model.norm.steering = torch.ones(3)


def in_a_kernel(model: Model) -> None:
    model.experts.quant_method.config.scales[0] += 1


@pytest.mark.parametrize(
    ("rewrites", "change"),
    [(nothing, in_place), (nothing, adds_a_tensor), (plain_norm, in_place), (hides_in_a_kernel, in_a_kernel)],
)
def test_a_change_is_seen_wherever_the_tensor_is(tmp_path: Path, rewrites: Rewrites, change: Rewrites) -> None:
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    changed, other = (worker(rewrites=rewrites, files=files) for _ in range(2))
    # Else memory that nobody has written would tell them apart, once what was loaded does not count any more.
    other.model.unused.data.copy_(changed.model.unused.data)
    before = changed.weights()
    assert before.misfit(other.weights()) == "" and before.files
    change(changed.model)
    after = changed.weights("poke")
    assert after.misfit(before) and before.misfit(after) and not after.files and not after.loaded.content
    change(other.model)
    assert after.misfit(other.weights("poke")) == "", "the same change on both sides"


def test_an_extension_that_moves_a_parameter_to_a_plain_attribute_hides_nothing() -> None:
    one, two = worker(), worker()
    two.model.unused.data.copy_(one.model.unused.data)
    one.weights(), two.weights()
    for each in (one, two):
        plain_norm(each.model)
    assert one.weights("poke").misfit(two.weights("poke")) == ""
    in_place(one.model)
    assert one.weights("poke").misfit(two.weights())


def test_what_is_out_of_sight_is_doubted_after_any_call(tmp_path: Path) -> None:
    """Never equal before and after."""
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one = worker(rewrites=hides_out_of_sight, files=files)
    before = one.weights()
    assert one.weights() == before
    after = one.weights("poke")
    assert "poke may have changed experts.weight, which is out of sight" in after.note
    assert before.misfit(after) and after.misfit(after)
    assert one.weights() == after, "for good"
    Loader(one.config, 1.0, nothing, list(files)).load_weights(one.model, SimpleNamespace(model="m"))
    assert one.weights("reload_weights").misfit(worker(files=files).weights()) == ""


@pytest.mark.parametrize("beside", ["poke", "reload_weights", "load_model"])
@pytest.mark.parametrize("rewrites", [nothing, hides_out_of_sight])
def test_a_call_beside_a_reload_is_not_taken_for_it(tmp_path: Path, rewrites: Rewrites, beside: str) -> None:
    """Before anybody looks. ``reload_weights`` may be given tensors instead of a folder."""
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one = worker(rewrites=rewrites, files=files)
    before = one.weights()
    _history(one.model).reads_files(list(files), object())
    in_place(one.model)
    found = one.weights("reload_weights", beside)
    assert before.misfit(found) and not found.files
    # A model of which the other call may have been the last one to load a part.
    loaded = worker(rewrites=rewrites, files=files)
    assert not loaded.weights("load_model", beside).files


def test_a_second_load_into_the_memory_of_the_first_hides_nothing() -> None:
    """Parameters of a new model may begin with what the last one had there."""

    def twice(values: float) -> Weights:
        one = worker(values)
        one.model.unused.data.zero_(), one.model.workspace.zero_()
        loader = Loader(one.config, values, nothing, [])
        loader.load_weights(one.model, SimpleNamespace(model="m"))
        hides_out_of_sight(one.model)
        return one.weights("load_model")

    assert twice(1.0).misfit(twice(2.0))


def test_experts_that_move_count_as_loaded() -> None:
    """Expert load balancing, without files: other experts are other weights, and a call may have changed them."""
    one, two, other = worker(), worker(), worker(2.0)
    two.model.experts.weight.data[[0, 1]] = two.model.experts.weight.data[[1, 0]]
    assert one.weights(moves=True).misfit(two.weights(moves=True)) == ""
    assert one.weights(moves=True).misfit(other.weights(moves=True))
    assert two.weights("poke", moves=True).misfit(one.weights(moves=True))


def test_where_nothing_says_what_was_loaded_an_empty_parameter_is_doubted() -> None:
    one = Worker(Model(), SimpleNamespace())
    assert one.weights().memory.content
    hides_out_of_sight(one.model)
    assert not Worker(one.model, SimpleNamespace()).weights().memory.content


def test_empty_parameters_that_were_always_empty_are_no_loss() -> None:
    """Marlin's indices of groups, which it does not use."""

    def adds_an_empty_one(model: Model) -> None:
        model.experts.g_idx = torch.nn.Parameter(torch.empty(0))

    one = worker(rewrites=adds_an_empty_one).weights()
    assert one.memory.content and one.misfit(worker(rewrites=adds_an_empty_one).weights()) == ""


def test_caches_and_adapters_are_no_weights() -> None:
    model = Model()
    model.norm.kv_cache = [torch.ones(3)]
    model.norm.itself = model
    assert set(held_by(model)) == {"norm.weight", "norm.bias", "experts.weight", "unused", "angles", "workspace"}


def test_files_count_until_they_are_replaced(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"x": b"1"})
    one = worker(files=(path,))
    assert one.weights().files and one.weights().each_file[0][0] == "a.safetensors"
    safetensors(path, {"x": b"22"})
    assert not one.weights().files
    path.unlink()
    assert not one.weights().files


def test_which_files_count(tmp_path: Path) -> None:
    """All that one load has read, and nothing of an earlier one."""
    paths = [safetensors(tmp_path / f"{at}.safetensors", {"a": bytes([at]) * 9}) for at in range(3)]

    def files(*loads: str) -> str:
        one = worker(files=(paths[0],))
        for load in loads:
            token = object()
            for at in load:
                _history(one.model).reads_files([paths[int(at)]], token)
            found = one.weights("reload_weights").files
        return found

    assert files("0") == files("1", "0") == files("0", "1", "2", "0") != files("1")
    assert files("01") not in (files("0"), files("1")), "two parts"
    assert files("1", "2") == files("2")


def test_files_count_if_nothing_is_left_of_what_was_there_before(tmp_path: Path) -> None:
    """A reload of some tensors leaves what the two differ in."""

    def made(name: str, **tensors: bytes) -> Path:
        return safetensors(tmp_path / f"{name}.safetensors", tensors)

    def reloaded(one: Worker, path: Path) -> Weights:
        _history(one.model).reads_files([path], object())
        return one.weights("reload_weights")

    built = made("one", x=b"1", y=b"1"), made("other", x=b"1", y=b"2")
    one, other = (worker(at, hides_out_of_sight, (path,)) for at, path in enumerate(built))
    assert one.weights().misfit(other.weights())
    part, whole = made("part", x=b"3"), made("whole", y=b"3", x=b"3")
    found = reloaded(one, part)
    assert "y was not loaded again" in found.misfit(reloaded(other, part))
    assert one.weights() == found, "for good"
    assert reloaded(one, whole).misfit(reloaded(other, whole)) == ""
    # Whoever was built without files (dummy weights) cannot tell.
    dummy = worker(rewrites=hides_out_of_sight)
    dummy.weights()
    assert "perhaps not all" in reloaded(dummy, whole).misfit(one.weights())
    # A file whose tensors have no names is whole only if it is the same.
    pickles = [tmp_path / name for name in ("a.bin", "b.bin")]
    for path in pickles:
        path.write_bytes(path.name.encode())
    pickled = worker(rewrites=hides_out_of_sight, files=(pickles[0],))
    pickled.weights()
    assert not reloaded(pickled, pickles[1]).files and reloaded(pickled, pickles[0]).files


@pytest.mark.parametrize("change", [in_place, adds_a_tensor])
def test_files_do_not_speak_for_what_no_checkpoint_has(tmp_path: Path, change: Rewrites) -> None:
    """Scales of a quantized KV cache that a call has set: a reload leaves them as they are."""
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one = worker(files=files)
    one.weights()
    change(one.model)
    one.weights("poke")
    for _ in range(2):
        _history(one.model).reads_files(files, object())
        found = one.weights("reload_weights")
        assert not found.files and "was not loaded again" in found.note


def test_a_reload_before_anybody_looks_hides_nothing(tmp_path: Path) -> None:
    one = worker(files=(safetensors(tmp_path / "a.safetensors", {"x": b"1", "y": b"1"}),))
    _history(one.model).reads_files([safetensors(tmp_path / "b.safetensors", {"x": b"1"})], object())
    assert not one.weights().files


def test_a_call_that_failed_leaves_nothing_known(tmp_path: Path) -> None:
    files = [safetensors(tmp_path / "a.safetensors", {"x": b"1"})]
    one = worker(files=tuple(files))
    one.weights()
    _history(one.model).reads_files(files, object())
    found = one.weights("reload_weights (failed)")
    assert not found.files and "may have changed what was loaded" in found.note


def test_what_changes_weights_before_anybody_looks_is_seen(tmp_path: Path) -> None:
    """A worker class that merges something into the weights behind ``load_model``."""
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one = worker(files=files)
    one.model.experts.weight.data += 1
    found = one.weights()
    assert not found.files and not found.loaded.content
    assert found.misfit(worker(files=files).weights()) and worker(files=files).weights().misfit(found)


def test_a_model_that_takes_another_ones_place_is_not_known_as_loaded() -> None:
    """It may have been loaded into the other one's memory, and then nothing tells what was written."""
    one = worker()
    assert one.weights().loaded.content and not one.weights("load_model").loaded.content


class Replaces(Loader):
    """Other weights than its own ``load_weights`` has loaded, before kernels rewrite them."""

    __module__ = "vllm.replaces"

    def __init__(self, config: Any, values: float, rewrites: Rewrites, files: list[Path]) -> None:
        def replaces(model: Model) -> None:
            model.experts.weight.data.fill_(values)
            rewrites(model)

        super().__init__(config, 1.0, replaces, files)

    def load_model(self, model_config: Any) -> Model:
        return super().load_model(model_config)


class Merges(Loader):
    """In a package of its own, into what vLLM's has read."""

    def load_weights(self, model: Model, model_config: Any) -> None:
        super().load_weights(model, model_config)
        model.experts.weight.data.add_(1)


class Copies(Loader):
    """ModelExpress: has vLLM's loader fill the model, and then copies other weights over them."""

    def load_model(self, model_config: Any) -> Model:
        model = Loader(self.load_config, 1.0, nothing, self._files).load_model(model_config)
        model.experts.weight.data.fill_(self._values)
        self._rewrites(model)
        return model


class Maps(Loader):
    """``ipc_cache``: the memory of another process. So does tensorizer, of what vLLM has not serialized."""

    __module__ = "vllm.maps"

    def load_model(self, model_config: Any) -> Model:
        model = Model()
        model.experts.weight = torch.nn.Parameter(torch.full((2, 3), self._values))
        self._rewrites(model)
        return model


@pytest.mark.parametrize("rewrites", [nothing, shuffles, hides_out_of_sight])
@pytest.mark.parametrize("kind", [Replaces, Merges, Copies, Maps])
def test_memory_alone_counts_of_a_loader_that_is_not_vllm_s(
    tmp_path: Path, kind: type[Base], rewrites: Rewrites
) -> None:
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one, two = (worker(values, rewrites, files, kind) for values in (2.0, 3.0))
    for model in (one.model, two.model):
        model.unused.data.zero_()
    found = one.weights()
    assert found.misfit(two.weights()) and found.misfit(worker(2.0, files=files).weights())
    if rewrites is hides_out_of_sight:
        assert f"{kind.__name__} may put other weights" in found.note or "out of sight" in found.note
        assert found.misfit(found), "nothing tells what it is"
    else:
        assert found.misfit(found) == ""


def test_which_tokens_sparse_attention_has_chosen_is_no_weight(tmp_path: Path) -> None:
    """No step before the first request writes it, unless CUDA graphs are captured."""
    files = (safetensors(tmp_path / "a.safetensors", {"x": b"1"}),)
    one = worker(files=files)
    before = one.weights()
    one.model.topk_indices_buffer.fill_(7)
    assert one.weights("poke") == before and before.files


def code_of(*found: Any) -> str:
    """As vLLM's worker, whose runner has this model."""
    return checksum_of({"computes": sorted(frozenset().union(*map(_computes_by, found)))})


@pytest.mark.parametrize(
    ("name", "value"), [("use_long_rope", True), ("attn_temperature_tuning", True), ("max_position_embeddings", 8192)]
)
def test_what_a_model_was_built_for_is_compared(name: str, value: object) -> None:
    """By its modules, since with ``--max-model-len auto`` vLLM builds it first, and then lowers the maximum to what
    fits. ``DynamicNTKScalingRotaryEmbedding``: MiniMax-M2 and PLaMo 3 pass the maximum to it."""
    plain, other = (torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(2))
    for one in (plain, other):
        vars(one[0]).update(use_long_rope=False, attn_temperature_tuning=False, max_trained_positions=2048)
        one[0].max_position_embeddings = 4096
    setattr(other[0], name, value)
    assert code_of(plain) != code_of(other)


@pytest.mark.parametrize("package", ["acme_plugin", "transformers_modules"])
def test_code_that_computes_and_is_not_vllm_s_is_compared(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's own, of ``--trust-remote-code``, or of a plugin of which the two servers have different releases."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found, models = [], []
    for number, text in enumerate(("more = 1", "more = 2", "more = 1")):
        folder = tmp_path / package / f"v{number}"
        folder.mkdir(parents=True)
        (folder / "modeling.py").write_text("import torch\nfrom . import more\nclass Acme(torch.nn.Linear): pass\n")
        (folder / "more.py").write_text(text)
        importlib.invalidate_caches()
        models.append(importlib.import_module(f"{package}.v{number}.modeling").Acme(1, 1))
        found.append(code_of(models[-1]))
        sys.modules.pop(package)
    assert found[0] == found[2] != found[1]
    # An engine computes with what it has imported, whatever is installed meanwhile.
    shutil.rmtree(tmp_path / package)
    assert code_of(models[0]) == found[0]
    assert code_of(type("Acme", (torch.nn.Linear,), {"__module__": package})(1, 1)) not in found
    assert _computes_by(torch.nn.Linear(1, 1)) == {"Linear"}


@pytest.mark.parametrize("is_inner", [False, True], ids=["model", "language model"])
@pytest.mark.parametrize(
    ("qualname", "text", "is_other"), [("Acme", "x = 1", False), ("Acme", "x = 2", True), ("Acme2", "x = 1", True)]
)
def test_a_model_of_vllm_s_is_compared_by_its_class_and_file(
    is_inner: bool, qualname: str, text: str, is_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--model-class-overrides``, or an image whose model was patched; not what only one pipeline stage has."""

    def computes(at: str, qualname: str, text: str, *more: Any) -> str:
        module = ModuleType(f"vllm.model_executor.models.{at}")
        module.__file__ = str(tmp_path / f"{at}.py")
        Path(module.__file__).write_text(text)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        names = dict.fromkeys(("compute_logits", "load_weights"))
        kind = type(qualname, (torch.nn.Sequential,), {"__module__": module.__name__, **names})
        model = kind(*more)
        return code_of(torch.nn.Sequential(model) if is_inner else model)

    there = {"__module__": "vllm.model_executor.models.of_one_stage"}
    tower = type("Tower", (torch.nn.Identity,), {**there, "load_weights": None})
    router = type("Router", (torch.nn.Identity,), {**there, "compute_logits": None})
    assert (computes("one", "Acme", "x = 1", tower(), router()) != computes("other", qualname, text)) is is_other


@pytest.mark.parametrize("where", ["quant_method", "impl"])
def test_code_of_a_plugin_s_quantization_or_attention_is_compared(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own layers hold it as a plain attribute (``register_quantization_config``, ``register_backend``)."""
    monkeypatch.syspath_prepend(str(tmp_path))
    base, found = type("QuantizeMethodBase", (), {"__module__": "vllm.base"}), []
    for number, scale in enumerate(("1.0", "0.5", "1.0")):
        name = f"acme_{where}_{number}"
        (tmp_path / f"{name}.py").write_text(f"def apply(self, layer, x):\n    return x @ layer.weight.T * {scale}\n")
        importlib.invalidate_caches()
        method = type("Method", (base,), {"__module__": name, "apply": importlib.import_module(name).apply})
        model = torch.nn.Linear(2, 2)
        setattr(model, where, method())
        found.append(code_of(model))
    assert found[0] == found[2] != found[1]
