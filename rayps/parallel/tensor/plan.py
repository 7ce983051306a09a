"""Plan which layers of a model are split among `size` workers, and how. The model may be on the meta device.

Without a plan by the user, these layers are split, as in Shoeybi et al., "Megatron-LM", 2019, part 3: pairs of
successive linear layers in a Sequential (with only activations and dropout between them), the first by `out`, the
second by `in`; attention by heads; the two linear layers of nn.TransformerEncoderLayer and DecoderLayer; large
embeddings by rows, and a linear layer whose weight is tied to such an embedding by `out`. All other layers stay whole.
A user's plan splits only the layers that it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.nn import functional as F

from rayps.core.errors import ConfigError, WorkloadError
from rayps.parallel.tensor.layer_split import LayerSplit, Plan
from rayps.parallel.tensor.layers import cuts
from rayps.parallel.tensor.user_plan import UserSplit, resolve, splits

BIG = 1 << 20  # smaller embeddings (in elements) are not split automatically: the exchange costs more than it saves
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
    """Return how each layer is split, by layer name: chosen automatically, or as in the user's plan `given`.

    Layers not returned stay whole; for one worker, no layer is returned. Raises ConfigError, WorkloadError: a name in
    `given` matches no layer; a layer cannot be split, or has fewer heads, rows or features than there are workers; of
    two layers with tied weights only one is split.
    """
    wishes = _automatic(model, size) if given is None else resolve(model, given)
    if size == 1:
        return {}
    if not wishes and given is None:
        raise _none_by_itself(model, size)
    made = _join(model, wishes)
    layers = dict(model.named_modules())
    for name, way in made.items():
        if way.units < size and given is not None:
            raise _too_small(name, layers[name], way, size)
    _must_keep_ties(model, made, size)
    return made


def _none_by_itself(model: nn.Module, size: int) -> WorkloadError:
    """Return the error for a model of which no layer is split automatically; it proposes a `plan` if possible."""
    could = next((name for name, each in model.named_modules() if splits(each) and name), None)
    tied = " (layers that share weights are left whole)" if any(len(n) > 1 for n in _holders(model).values()) else ""
    way_out = "use pipeline instead" if could is None else f"name some in plan, e.g. plan={{{could!r}: 'out'}}"
    return WorkloadError(
        f"no layer can be split among {size} workers automatically{tied}: {way_out}; automatic are "
        "pairs of Linear in a Sequential, attention, transformer layers and large embeddings"
    )


def chains(model: nn.Module) -> Iterator[Named]:
    """Yield, for each outermost Sequential, its layers in order with their names; nested Sequentials are flattened."""
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
    holders = _holders(model)
    shared = {name.rpartition(".")[0] for names in holders.values() if len(names) > 1 for name in names}
    seen = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    free = {name for name, each in model.named_modules() if splits(each) and seen[id(each)] == 1 and name not in shared}
    wishes: dict[str, UserSplit] = {}
    for chain in chains(model):
        _pair_up(chain, free, size, wishes)
    for name, each in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(each, nn.MultiheadAttention) and name in free and each.num_heads >= size:
            wishes[name] = UserSplit("heads")
        elif isinstance(each, _BLOCKS) and _usual(each):
            pair = (f"{prefix}linear1", f"{prefix}linear2")
            if free.issuperset(pair) and each.linear1.out_features >= size:
                wishes.update(zip(pair, (UserSplit("out"), UserSplit("in")), strict=True))
    _big_embeddings(model, free, holders, size, wishes)
    return wishes


def _pair_up(chain: Named, free: set[str], size: int, wishes: dict[str, UserSplit]) -> None:
    first = ""
    for name, layer in chain:
        if isinstance(layer, nn.Linear) and name in free:
            if first:
                wishes[first], wishes[name] = UserSplit("out"), UserSplit("in")
                first = ""
            elif layer.out_features >= size:
                first = name
        elif not isinstance(layer, _ELEMENTWISE):
            first = ""


def _usual(layer: nn.Module) -> bool:
    """Return whether the block's two linear layers have only an activation and dropout between them."""
    base = next(kind for kind in _BLOCKS if isinstance(layer, kind))
    act = layer.activation
    known = act in (F.relu, F.gelu, F.silu) or isinstance(act, _ELEMENTWISE)
    return known and type(layer)._ff_block is base._ff_block  # type: ignore[attr-defined]


def _big_embeddings(
    model: nn.Module, free: set[str], holders: dict[int, list[str]], size: int, wishes: dict[str, UserSplit]
) -> None:
    layers = dict(model.named_modules())
    for name, each in layers.items():
        if not isinstance(each, nn.Embedding) or each.weight.numel() < BIG or each.num_embeddings < size:
            continue
        if name in free and "rows" in splits(each):
            wishes[name] = UserSplit("rows")
        tied = [holder.rpartition(".")[0] for holder in holders[id(each.weight)]]
        others = [other for other in tied if other != name]
        if others and "rows" in splits(each) and all(splits(layers[other]) == ("out", "in") for other in others):
            wishes.update({name: UserSplit("rows"), **dict.fromkeys(others, UserSplit("out"))})


# From requests to splits


def _join(model: nn.Module, wishes: dict[str, UserSplit]) -> Plan:
    """Return how the requested layers are split; a layer passes slices directly to the next one where possible."""
    layers = dict(model.named_modules())
    ways = {name: _way(name, layers[name], wish) for name, wish in wishes.items()}
    for chain in chains(model):
        _join_chain(chain, ways)
    for name, each in layers.items():
        prefix = f"{name}." if name else ""
        if isinstance(each, _BLOCKS):
            first, second = f"{prefix}linear1", f"{prefix}linear2"
            if _split(ways, first) == "out" and _split(ways, second) == "in" and _usual(each):
                _keep(ways, [first], second, [(f"{prefix}dropout", each.dropout)])
        elif not _plain(each) and not isinstance(each, nn.MultiheadAttention):
            _join_children(prefix, each, ways)
    return ways


def _way(name: str, layer: nn.Module, wish: UserSplit) -> LayerSplit:
    if isinstance(layer, nn.MultiheadAttention):
        return LayerSplit("heads", layer.embed_dim, layer.embed_dim // layer.num_heads)
    if isinstance(layer, nn.Embedding):
        return LayerSplit(wish.split, layer.num_embeddings if wish.split == "rows" else layer.embedding_dim, wish.unit)
    linear = cast("nn.Linear", layer)
    width = linear.out_features if wish.split == "out" else linear.in_features
    if width % (wish.unit * wish.blocks):
        raise ConfigError(
            f"plan splits the layer {name!r} into blocks ({wish.blocks}) of units of {wish.unit}, but its {width} "
            f"{wish.split}puts are not a multiple of {wish.blocks * wish.unit}",
            field="plan",
        )
    return LayerSplit(wish.split, width, wish.unit, wish.blocks)


def _split(ways: Plan, name: str) -> str:
    return ways[name].split if name in ways else ""


def _join_chain(chain: Named, ways: Plan) -> None:
    first, drops = "", cast("Named", [])
    for name, layer in chain:
        if _split(ways, name) == "in" and first:
            _keep(ways, [first], name, drops)
            first = ""
        elif _split(ways, name) == "out" and isinstance(layer, nn.Linear):
            first, drops = name, []
        elif isinstance(layer, _ELEMENTWISE):
            drops += [(name, layer)] if isinstance(layer, _DROPOUTS) else []
        else:
            first = ""


def _join_children(prefix: str, parent: nn.Module, ways: Plan) -> None:
    """Let linear layers split by `out` pass slices to the next one split by `in`, in a module's own forward()."""
    outs: list[str] = []
    for child, layer in parent.named_children():
        name = prefix + child
        if not isinstance(layer, nn.Linear) or name not in ways:
            continue
        if ways[name].split == "out":
            outs.append(name)
        elif outs:
            _must_fit(outs, name, ways)
            _keep(ways, outs, name, [], region=name)
            outs = []


def _must_fit(outs: list[str], last: str, ways: Plan) -> None:
    width = ways[last].width
    if any(ways[name].width == width * ways[name].blocks for name in outs):
        return
    name = outs[0]
    many = ways[name].width // width
    hint = f"; if its outputs are {many} blocks (packed q, k, v), give 'out*{many}'" if many > 1 else ""
    raise ConfigError(
        f"plan splits {name!r} by its {ways[name].width} outputs, and the layer after it, {last!r}, by its {width} "
        f"inputs: the numbers must be equal, as the second layer takes the slices of the first{hint}",
        field="plan",
    )


def _keep(ways: Plan, outs: list[str], last: str, drops: Named, region: str = "") -> None:
    """Let the layers `outs` pass their slices to the layer `last` directly; `drops` are dropout layers between them."""
    lead = next(ways[name] for name in outs if ways[name].width == ways[last].width * ways[name].blocks)
    for name in outs:
        way = ways[name]
        ways[name] = LayerSplit("out", way.width, way.unit, way.blocks, True, region)
    ways[last] = LayerSplit("in", ways[last].width, lead.unit, 1, True, region)
    for name, layer in drops:
        if getattr(layer, "p", 0.0):
            ways[name] = LayerSplit("dropout", ways[last].width, lead.unit, 1, True)


# Refusals


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by the parameter's id; a tied parameter has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _too_small(name: str, layer: nn.Module, way: LayerSplit, size: int) -> ConfigError:
    what = {"heads": "heads", "rows": "rows"}.get(way.split, "outputs" if way.split == "out" else "inputs")
    have = f"{way.units} {what}" if way.unit == 1 or what == "heads" else f"{way.units} units of {way.unit} {what}"
    return ConfigError(
        f"size is {size}, but the layer {name!r} ({type(layer).__name__}) has {have}: every worker needs at least "
        f"one; give a smaller size, or keep the layer whole (plan={{{name!r}: 'none'}})",
        field="size",
    )


def _must_keep_ties(model: nn.Module, ways: Plan, size: int) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    alias: dict[int, LayerSplit] = {id(modules[name]): way for name, way in ways.items()}
    cut: dict[str, object] = {}
    for name, each in modules.items():
        if id(each) in alias:
            for inner, found in cuts(each, alias[id(each)], size, 0).items():
                cut[f"{name}.{inner}" if name else inner] = found
    for names in _holders(model).values():
        if any(cut.get(name) != cut.get(names[0]) for name in names):
            raise WorkloadError(
                f"{' and '.join(names)} are one tensor, but the plan splits them differently: split both in the same "
                "dimension (the embedding by 'rows' and the linear layer by 'out'), or neither"
            )
