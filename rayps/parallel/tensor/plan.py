"""Plan which layers of a model are split among `size` workers, and how. The model may be on the meta device.

A user's plan splits only the layers that it names. Without a user's plan, these layers are split, as in Shoeybi et al.,
"Megatron-LM", 2019, part 3:

- pairs of successive linear layers in a Sequential, with only activations and dropout between them: the first by `out`,
  the second by `in`
- the two linear layers of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, as such a pair
- attention, by heads
- large embeddings by rows, and a linear layer whose weight is tied to such an embedding by `out`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import cast

from rayps_client.errors import ConfigError, WorkloadError
from torch import nn
from torch.nn import functional as F

from rayps.parallel.tensor.layers import cuts
from rayps.parallel.tensor.user_plan import UserSplit, resolve, splits
from rayps.tensors.layer_split import LayerSplit, Plan

BIG = 1 << 20  # elements; smaller embeddings are not split automatically: the exchange costs more than it saves
_DROPOUTS = (nn.Dropout,)
_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
    nn.Identity,
    nn.Dropout,
)
_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
Named = list[tuple[str, nn.Module]]


def plan(model: nn.Module, size: int, given: dict[str, str] | None = None) -> Plan:
    """Return a dict from layer names to splits: chosen automatically, or as in the user's plan `given`.

    Layers that are not returned stay whole. For one worker, no layer is returned.

    Raises:
        ConfigError: a name in `given` matches no layer, or a layer has fewer heads, rows or features than there are
            workers.
        WorkloadError: a layer cannot be split, no layer can be split automatically, or of two layers with tied weights
            only one is split.
    """
    requests = _automatic(model, size) if given is None else resolve(model, given)
    if size == 1:
        return {}
    if not requests and given is None:
        raise _nothing_to_split(model, size)
    made = _join(model, requests)
    layers = dict(model.named_modules())
    for name, way in made.items():
        if way.units < size and given is not None:
            raise _too_small(name, layers[name], way, size)
    _check_ties(model, made, size)
    return made


def _nothing_to_split(model: nn.Module, size: int) -> WorkloadError:
    """Return the error for a model of which no layer can be split automatically. It proposes a `plan` if possible."""
    could = next((name for name, each in model.named_modules() if splits(each) and name), None)
    tied = (
        " (layers that share weights are left whole)"
        if any(len(n) > 1 for n in _parameter_names(model).values())
        else ""
    )
    remedy = "use a pipeline instead" if could is None else f"name layers in plan, e.g. plan={{{could!r}: 'out'}}"
    return WorkloadError(
        f"no layer can be split among {size} workers automatically{tied}: {remedy}. Layers that are split "
        "automatically: pairs of Linear in a Sequential, attention, transformer layers and large embeddings"
    )


def chains(model: nn.Module) -> Iterator[Named]:
    """Yield, for each outermost Sequential, its named layers in order; nested Sequentials are flattened."""
    inner = {id(layer) for each in model.modules() if _plain(each) for layer in each.children() if _plain(layer)}
    for name, each in model.named_modules():
        if _plain(each) and id(each) not in inner:
            yield list(_leaves(name, each))


def _plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward


def _leaves(name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not _plain(layer):
        yield name, layer
        return
    for inner, each in layer.named_children():
        yield from _leaves(f"{name}.{inner}" if name else inner, each)


# Automatic splits


def _automatic(model: nn.Module, size: int) -> dict[str, UserSplit]:
    names_of = _parameter_names(model)
    shared = {name.rpartition(".")[0] for names in names_of.values() if len(names) > 1 for name in names}
    seen = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    free = {name for name, each in model.named_modules() if splits(each) and seen[id(each)] == 1 and name not in shared}
    requests: dict[str, UserSplit] = {}
    for chain in chains(model):
        _split_pairs(chain, free, size, requests)
    for name, each in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(each, nn.MultiheadAttention) and name in free and each.num_heads >= size:
            requests[name] = UserSplit("heads")
        elif isinstance(each, _BLOCKS) and _has_usual_forward(each):
            pair = (f"{prefix}linear1", f"{prefix}linear2")
            if free.issuperset(pair) and each.linear1.out_features >= size:
                requests.update(zip(pair, (UserSplit("out"), UserSplit("in")), strict=True))
    _big_embeddings(model, free, names_of, size, requests)
    return requests


def _split_pairs(chain: Named, free: set[str], size: int, requests: dict[str, UserSplit]) -> None:
    first = ""
    for name, layer in chain:
        if isinstance(layer, nn.Linear) and name in free:
            if first:
                requests[first], requests[name] = UserSplit("out"), UserSplit("in")
                first = ""
            elif layer.out_features >= size:
                first = name
        elif not isinstance(layer, _ELEMENTWISE):
            first = ""


def _has_usual_forward(layer: nn.Module) -> bool:
    """Return whether the block's two linear layers have only an activation and dropout between them."""
    base = next(kind for kind in _BLOCKS if isinstance(layer, kind))
    act = layer.activation
    known = act in (F.relu, F.gelu, F.silu) or isinstance(act, _ELEMENTWISE)
    return known and type(layer)._ff_block is base._ff_block  # type: ignore[attr-defined]


def _big_embeddings(
    model: nn.Module, free: set[str], names_of: dict[int, list[str]], size: int, requests: dict[str, UserSplit]
) -> None:
    layers = dict(model.named_modules())
    for name, each in layers.items():
        if not isinstance(each, nn.Embedding) or each.weight.numel() < BIG or each.num_embeddings < size:
            continue
        if name in free and "rows" in splits(each):
            requests[name] = UserSplit("rows")
        tied = [holder.rpartition(".")[0] for holder in names_of[id(each.weight)]]
        others = [other for other in tied if other != name]
        if others and "rows" in splits(each) and all(splits(layers[other]) == ("out", "in") for other in others):
            requests.update({name: UserSplit("rows"), **dict.fromkeys(others, UserSplit("out"))})


# From requests to splits


def _join(model: nn.Module, requests: dict[str, UserSplit]) -> Plan:
    """Return how the requested layers are split. Where possible, a layer passes slices directly to the next layer."""
    layers = dict(model.named_modules())
    ways = {name: _way(name, layers[name], request) for name, request in requests.items()}
    for chain in chains(model):
        _join_chain(chain, ways)
    for name, each in layers.items():
        prefix = f"{name}." if name else ""
        if isinstance(each, _BLOCKS):
            first, second = f"{prefix}linear1", f"{prefix}linear2"
            if _split(ways, first) == "out" and _split(ways, second) == "in" and _has_usual_forward(each):
                _pass_slices(ways, [first], second, [(f"{prefix}dropout", each.dropout)])
        elif not _plain(each) and not isinstance(each, nn.MultiheadAttention):
            _join_children(prefix, each, ways)
    return ways


def _way(name: str, layer: nn.Module, request: UserSplit) -> LayerSplit:
    if isinstance(layer, nn.MultiheadAttention):
        return LayerSplit("heads", layer.embed_dim, layer.embed_dim // layer.num_heads)
    if isinstance(layer, nn.Embedding):
        return LayerSplit(
            request.split, layer.num_embeddings if request.split == "rows" else layer.embedding_dim, request.unit
        )
    linear = cast("nn.Linear", layer)
    width = linear.out_features if request.split == "out" else linear.in_features
    if width % (request.unit * request.blocks):
        raise _not_divisible(name, width, request)
    return LayerSplit(request.split, width, request.unit, request.blocks)


def _split(ways: Plan, name: str) -> str:
    return ways[name].split if name in ways else ""


def _join_chain(chain: Named, ways: Plan) -> None:
    first, drops = "", cast("Named", [])
    for name, layer in chain:
        if _split(ways, name) == "in" and first:
            _pass_slices(ways, [first], name, drops)
            first = ""
        elif _split(ways, name) == "out" and isinstance(layer, nn.Linear):
            first, drops = name, []
        elif isinstance(layer, _ELEMENTWISE):
            drops += [(name, layer)] if isinstance(layer, _DROPOUTS) else []
        else:
            first = ""


def _join_children(prefix: str, parent: nn.Module, ways: Plan) -> None:
    """Let linear layers split by `out` pass slices to the next linear layer split by `in` of the module `parent`.

    The module's own forward() runs on the slices between them.
    """
    outs: list[str] = []
    for child, layer in parent.named_children():
        name = prefix + child
        if not isinstance(layer, nn.Linear) or name not in ways:
            continue
        if ways[name].split == "out":
            outs.append(name)
        elif outs:
            _check_widths(outs, name, ways)
            _pass_slices(ways, outs, name, [], region=name)
            outs = []


def _check_widths(outs: list[str], last: str, ways: Plan) -> None:
    width = ways[last].width
    if any(ways[name].width == width * ways[name].blocks for name in outs):
        return
    name = outs[0]
    many = ways[name].width // width
    hint = f". If the outputs are {many} blocks (packed q, k, v), give 'out*{many}'" if many > 1 else ""
    raise ConfigError(
        f"plan splits {name!r} by its {ways[name].width} outputs, and the layer after it, {last!r}, by its {width} "
        f"inputs: the numbers must be equal, because the second layer takes the slices of the first{hint}",
        field="plan",
    )


def _pass_slices(ways: Plan, outs: list[str], last: str, drops: Named, region: str = "") -> None:
    """Let the layers `outs` pass their slices directly to the layer `last`; `drops` are the dropout layers between."""
    lead = next(ways[name] for name in outs if ways[name].width == ways[last].width * ways[name].blocks)
    for name in outs:
        way = ways[name]
        ways[name] = LayerSplit("out", way.width, way.unit, way.blocks, True, region)
    ways[last] = LayerSplit("in", ways[last].width, lead.unit, 1, True, region)
    for name, layer in drops:
        if getattr(layer, "p", 0.0):
            ways[name] = LayerSplit("dropout", ways[last].width, lead.unit, 1, True)


# Refusals


def _parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return a dict from each parameter's id to all its names; a tied parameter has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _not_divisible(name: str, width: int, request: UserSplit) -> ConfigError:
    what, blocks, unit = f"{request.split}puts", request.blocks, request.unit
    text = f"{request.split}{f'*{blocks}' if blocks > 1 else ''}{f':{unit}' if unit > 1 else ''}"
    number = f"{blocks} * {unit} = {blocks * unit}" if blocks > 1 and unit > 1 else f"{blocks * unit}"
    parts = [f"{blocks} blocks"] * (blocks > 1) + [f"in units of {unit} {what}"] * (unit > 1)
    options = " or the ".join(["blocks"] * (blocks > 1) + ["unit"] * (unit > 1))
    return ConfigError(
        f"plan splits layer {name!r} as {text} ({', '.join(parts)}): its number of {what} must be a multiple of "
        f"{number}, and it is {width}. Change the {options}",
        field="plan",
    )


def _too_small(name: str, layer: nn.Module, way: LayerSplit, size: int) -> ConfigError:
    what = {"heads": "heads", "rows": "rows"}.get(way.split, "outputs" if way.split == "out" else "inputs")
    have = f"{way.units} {what}" if way.unit == 1 or what == "heads" else f"{way.units} units of {way.unit} {what}"
    return ConfigError(
        f"size is {size}, but the layer {name!r} ({type(layer).__name__}) has {have}: every worker needs at least "
        f"one. Give a smaller size, or keep the layer whole (plan={{{name!r}: 'none'}})",
        field="size",
    )


def _check_ties(model: nn.Module, ways: Plan, size: int) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    alias: dict[int, LayerSplit] = {id(modules[name]): way for name, way in ways.items()}
    cut: dict[str, object] = {}
    for name, each in modules.items():
        if id(each) in alias:
            for inner, found in cuts(each, alias[id(each)], size, 0).items():
                cut[f"{name}.{inner}" if name else inner] = found
    for names in _parameter_names(model).values():
        if any(cut.get(name) != cut.get(names[0]) for name in names):
            raise WorkloadError(
                f"{' and '.join(names)} are one tensor, but the plan splits the layers differently: split both "
                "layers in the same dimension (the embedding by 'rows' and the linear layer by 'out'), or neither"
            )
