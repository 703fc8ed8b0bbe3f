"""The table of switches that steadiness asks for: one line each, how it is read and written and what it shall be.

Reading is the fingerprint's own, so that what is held here is what a record shows. Precision of float32 needs more:
torch has an old interface (`allow_tf32`, `set_float32_matmul_precision`) and a new one (`fp32_precision`), the old
setters write into the new settings, and after a mixed use the old getters raise. So the two old settings are kept with
what they write into, a setting that inherits is read with its parents out of the way, and what is right already is not
written at all.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from provenance.fingerprint import flags
from provenance.fingerprint.reading import Moot

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], object]
EXACT = ("none", "ieee")
PARENTS = {"torch.fp32_precision": ("generic", "all"), "torch.backends.cudnn.fp32_precision": ("cuda", "all"),
           "torch.backends.mkldnn.fp32_precision": ("mkldnn", "all")}  # fmt: skip
CHILDREN = {"torch.backends.cuda.matmul.fp32_precision": ("cuda", "matmul"),
            "torch.backends.mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
            "torch.backends.mkldnn.conv.fp32_precision": ("mkldnn", "conv"),
            "torch.backends.mkldnn.rnn.fp32_precision": ("mkldnn", "rnn")}  # fmt: skip
MATMUL = [("cuda", "matmul"), ("mkldnn", "matmul")]
CONV = [("cuda", "conv"), ("cuda", "rnn")]


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch. ``read`` returns what ``write`` takes; ``is_steady`` says of what is read whether it will do."""

    name: str
    steady: Any
    read: Read
    write: Write
    is_steady: Callable[[Any], bool]
    why: str = ""
    asked: str = ""  # only on request: "strict", "warn", "math"


# -- float32 precision ------------------------------------------------------------------------------


def _get(torch: Any, key: tuple[str, str]) -> str:
    return str(torch._C._get_fp32_precision_getter(*key))


def _set(torch: Any, key: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*key, value)


def _own(torch: Any, *keys: tuple[str, str]) -> list[str]:
    """Read settings as they are set, with the parents that they would inherit from out of the way."""
    parents = [parent for parent in PARENTS.values() if parent not in keys]
    before: list[tuple[tuple[str, str], str]] = []
    try:
        for parent in parents:  # generic first: what the others say then is their own
            before.append((parent, _get(torch, parent)))
            if before[-1][1] != "none":
                _set(torch, parent, "none")
        return [_get(torch, key) for key in keys]
    finally:
        for parent, value in before:
            if value != "none":
                _set(torch, parent, value)


def _new_api(torch: Any) -> bool:
    return hasattr(torch._C, "_get_fp32_precision_getter")


def _need_new(torch: Any) -> None:
    if not _new_api(torch):
        raise Moot("this torch has only the older precision settings")


def _precision(name: str, key: tuple[str, str]) -> Switch:
    def read(torch: Any) -> str:
        _need_new(torch)
        if key == ("generic", "all"):
            return _get(torch, key)
        return _own_parent(torch, key) if key[1] == "all" else _own(torch, key)[0]

    return Switch(name, "ieee", read, lambda torch, value: _set(torch, key, value), lambda own: own in EXACT,
                  "TF32 and bfloat16 inside float32 products round to 10 and 7 bits")  # fmt: skip


def _own_parent(torch: Any, key: tuple[str, str]) -> str:
    root = PARENTS["torch.fp32_precision"]
    above = _get(torch, root)
    if above == "none":
        return _get(torch, key)
    _set(torch, root, "none")
    try:
        return _get(torch, key)
    finally:
        _set(torch, root, above)


def _read_matmul(torch: Any) -> tuple[str, ...]:
    """Read the old word for products, and what its setter writes into."""
    if not _new_api(torch):
        return (str(torch.get_float32_matmul_precision()),)
    own = _own(torch, *MATMUL)
    try:
        return (str(torch.get_float32_matmul_precision()), *own)
    except RuntimeError:
        return (_old_matmul(torch, own), *own)


def _old_matmul(torch: Any, own: list[str]) -> str:
    """Find the old word where its getter raises, after a mixed use: with the new settings aside for a moment."""
    try:
        for key in MATMUL:
            _set(torch, key, "ieee")
        return str(torch.get_float32_matmul_precision())
    finally:
        for key, value in zip(MATMUL, own, strict=True):
            _set(torch, key, value)


def _write_matmul(torch: Any, value: tuple[str, ...]) -> None:
    torch.set_float32_matmul_precision(value[0])
    for key, own in zip(MATMUL, value[1:], strict=False):
        _set(torch, key, own)


def _read_conv(torch: Any) -> tuple[Any, ...]:
    if not _new_api(torch):
        return (bool(torch._C._get_cudnn_allow_tf32()),)
    own = _own(torch, *CONV)
    try:
        return (bool(torch._C._get_cudnn_allow_tf32()), *own)
    except RuntimeError:
        return (_old_conv(torch, own), *own)


def _old_conv(torch: Any, own: list[str]) -> bool:
    """Find the old switch of convolutions where its getter raises: it answers only where the new settings agree."""
    try:
        for key in CONV:
            _set(torch, key, "tf32")
        torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return False
    else:
        return True
    finally:
        for key, value in zip(CONV, own, strict=True):
            _set(torch, key, value)


def _write_conv(torch: Any, value: tuple[Any, ...]) -> None:
    torch._C._set_cudnn_allow_tf32(value[0])
    for key, own in zip(CONV, value[1:], strict=False):
        if _own(torch, key)[0] != own:
            _set(torch, key, own)


# -- the rest ---------------------------------------------------------------------------------------


def _plain(name: str, steady: Any, write: Write, why: str = "", asked: str = "") -> Switch:
    return Switch(name, steady, flags.SWITCHES[name], write, lambda value: value == steady, why, asked)


def _attribute(dotted: str, steady: Any, why: str = "") -> Switch:
    """Make the switch for an attribute below torch.backends."""
    *path, last = dotted.split(".")

    def write(torch: Any, value: Any) -> None:
        place = torch.backends
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)

    return _plain(f"torch.backends.{dotted}", steady, write, why)


def _reduced(kind: str) -> Switch:
    """Make the switch for half-precision sums inside a product: newer torch keeps the split along K beside it."""
    name = f"allow_{kind}_reduced_precision_reduction"

    def read(torch: Any) -> Any:
        found = getattr(torch._C, f"_get_cublas_{name}")()
        return tuple(found) if isinstance(found, (tuple, list)) else bool(found)

    def write(torch: Any, value: Any) -> None:
        pair = isinstance(read(torch), tuple)
        setattr(torch.backends.cuda.matmul, name, value if pair else value if isinstance(value, bool) else value[0])

    return Switch(f"torch.backends.cuda.matmul.{name}", (False, False), read, write,
                  lambda value: value in {(False, False), False}, "and its split along K")  # fmt: skip


def _algorithms(torch: Any, enabled: bool, warn_only: bool) -> None:
    direct = getattr(torch._C, "_set_deterministic_algorithms", None)
    if direct is None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    else:  # the public function loads the compiler's settings as well, which takes a second
        direct(enabled, warn_only=warn_only)


def _enable(torch: Any, value: bool) -> None:
    _algorithms(torch, value, torch.is_deterministic_algorithms_warn_only_enabled())


def _warn(torch: Any, value: bool) -> None:
    _algorithms(torch, torch.are_deterministic_algorithms_enabled(), value)


def _compiler(name: str, steady: Any, why: str = "") -> Switch:
    full = f"torch.inductor.{name}"

    def write(_: Any, value: Any) -> None:
        setattr(sys.modules["torch._inductor.config"], name, value)

    return Switch(full, steady, flags.COMPILER[full], write, lambda value: value == steady, why)


def _kernel(kind: str, steady: bool) -> Switch:
    def write(torch: Any, value: bool) -> None:
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(value)

    return _plain(f"torch.backends.cuda.{kind}_sdp_enabled", steady, write, "", "math")


ON, OFF = True, False
CHOICE = "timing picks the algorithm otherwise"
# In the order of writing. Restoring runs the same way: the old settings first, since they write into the new.
TABLE: tuple[Switch, ...] = (
    Switch("torch.float32_matmul_precision", ("highest", "ieee", "ieee"), _read_matmul, _write_matmul,
           lambda value: value[0] == "highest", "allow_tf32 of products is this same switch"),
    Switch("torch.backends.cudnn.allow_tf32", (False, "none", "none"), _read_conv, _write_conv,
           lambda value: value[0] is False and all(own in EXACT for own in value[1:]), "torch starts with it on"),
    *(_precision(name, key) for name, key in {**PARENTS, **CHILDREN}.items()),
    _attribute("cudnn.benchmark", OFF, CHOICE),
    _attribute("cudnn.deterministic", ON),
    _attribute("mkldnn.deterministic", ON),
    _reduced("fp16"),
    _reduced("bf16"),
    _attribute("cuda.matmul.allow_fp16_accumulation", OFF),
    _plain("torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed", OFF,
           lambda torch, value: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(value)),
    _plain("torch.cuda.tunable", OFF, lambda torch, value: torch.cuda.tunable.enable(value), CHOICE),
    _plain("torch.deterministic_warn_only", OFF, _warn, "what has no such form raises", "strict"),
    _plain("torch.deterministic_warn_only", ON, _warn, "what has no such form warns", "warn"),
    _plain("torch.deterministic_algorithms", ON, _enable),
    _plain("torch.fill_uninitialized_memory", ON,
           lambda torch, value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value)),
    *(_kernel(kind, kind == "math") for kind in ("math", "flash", "mem_efficient", "cudnn")),
    _compiler("deterministic", ON),
    _compiler("max_autotune", OFF, CHOICE),
    _compiler("max_autotune_gemm", OFF, CHOICE),
    _compiler("coordinate_descent_tuning", OFF, CHOICE),
    _compiler("use_fast_math", OFF),
)  # fmt: skip


def chosen(strict: bool, math: bool) -> list[Switch]:
    """Return the switches of one request."""
    asked = {"", "strict" if strict else "warn"} | ({"math"} if math else set())
    return [switch for switch in TABLE if switch.asked in asked]


def snapshot(torch: Any) -> dict[str, Any]:
    """Read every switch of the table that this torch has, as it has to be put back."""
    found: dict[str, Any] = {}
    for switch in TABLE:
        try:
            found[switch.name] = switch.read(torch)
        except (Moot, AttributeError, RuntimeError):
            continue
    return found


def restore(torch: Any, before: dict[str, Any]) -> None:
    """Write back what is not as it was. One switch that refuses does not keep the others from coming back."""
    failed: list[Exception] = []
    for switch in {switch.name: switch for switch in TABLE}.values():
        if switch.name not in before:
            continue
        try:
            if switch.read(torch) != before[switch.name]:
                switch.write(torch, before[switch.name])
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]
