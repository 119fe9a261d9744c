"""Which slice of each weight a rank holds, and which sizes divide. Lesson 14 builds it.

Tensor parallelism (Megatron-LM; Shoeybi et al., 2019) cuts a layer: the first product of attention and of the MLP by
columns (each rank has some heads, some of the intermediate values), the second by rows, so that x W = sum_k x_k W_k and
one all-reduce ends each half of a layer. The embedding and the head are cut by the vocabulary. Pipeline parallelism
cuts between layers. rank = stage * tensor_parallel_size + its place within the stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.config import ModelConfig, positive_whole
from minillm.errors import MinillmError

Slices = tuple[slice, ...]
ALL = slice(None)


@dataclass(frozen=True)
class Place:
    """One rank of a grid: `tp_rank` of `tp` within `stage` of `pp`."""

    tp_rank: int = 0
    tp: int = 1
    stage: int = 0
    pp: int = 1

    @classmethod
    def of_rank(cls, rank: int, tp: int, pp: int) -> Place:
        return cls(rank % tp, tp, rank // tp, pp)

    @property
    def rank(self) -> int:
        return self.stage * self.tp + self.tp_rank

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the final norm and the head."""
        return self.stage == self.pp - 1


def why_not(config: ModelConfig, tp: int) -> str | None:
    """Why so many ranks cannot share a layer of this model, in words; None: they can."""
    sizes = {"query heads": config.num_heads, "intermediate values": config.intermediate_size,
             "tokens of the vocabulary": config.vocab_size}  # fmt: skip
    for what, size in sizes.items():
        if size % tp:
            return f"{size} {what} do not divide by {tp}"
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads neither divide by {tp} nor are shared evenly by {tp} ranks"
    return None


def sizes_that_fit(config: ModelConfig) -> list[int]:
    """Every tensor parallel size that this model can have."""
    return [n for n in range(1, config.num_heads + 1) if why_not(config, n) is None]


def check(config: ModelConfig, tp: int = 1, pp: int = 1) -> None:
    """Raise MinillmError, in words and with the sizes that would do, unless the model can be cut like this."""
    positive_whole("tensor_parallel_size", tp)
    positive_whole("pipeline_parallel_size", pp)
    if (why := why_not(config, tp)) is not None:
        fit = ", ".join(map(str, sizes_that_fit(config)))
        raise MinillmError(f"tensor_parallel_size {tp} does not fit this model: {why}; sizes that do: {fit}")
    if pp > config.num_layers:
        raise MinillmError(
            f"pipeline_parallel_size {pp} is more than the model's {config.num_layers} layers; each stage needs one"
        )


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a stage: as even as can be, the first stages have one more where it does not come out even."""
    each, more = divmod(num_layers, pp)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def local_config(config: ModelConfig, tp: int = 1, pp: int = 1, stage: int = 0) -> ModelConfig:
    """The model as one rank sees it: its heads, its intermediate values, its layers. The vocabulary stays whole."""
    check(config, tp, pp)
    return config.replace(
        num_heads=config.num_heads // tp, num_kv_heads=max(1, config.num_kv_heads // tp),
        intermediate_size=config.intermediate_size // tp, num_layers=len(stage_layers(config.num_layers, pp, stage)),
    )  # fmt: skip


def kv_heads(config: ModelConfig, place: Place) -> range:
    """Which of the model's KV heads a rank holds: its share, or the one that its query heads read (replicated)."""
    if config.num_kv_heads % place.tp == 0:
        each = config.num_kv_heads // place.tp
        return range(place.tp_rank * each, (place.tp_rank + 1) * each)
    head = place.tp_rank * config.num_kv_heads // place.tp
    return range(head, head + 1)


def owns_kv(config: ModelConfig, place: Place) -> bool:
    """Whether this rank is the first that holds its KV heads: of replicas one speaks for all."""
    return place.tp_rank == 0 or kv_heads(config, place) != kv_heads(
        config, Place(place.tp_rank - 1, place.tp, place.stage, place.pp)
    )


def local_tensors(
    config: ModelConfig, place: Place, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[str, Slices]]:
    """Of a checkpoint's tensors (`weights.expected_shapes`): those of this rank, name -> (its name here, its slices).

    The bias of a row-parallel product stands on its first rank alone: the sum over ranks has it once.
    """
    layers = stage_layers(config.num_layers, place.pp, place.stage)
    found: dict[str, tuple[str, Slices]] = {}
    for name, shape in shapes.items():
        local = name
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            if int(number) not in layers:
                continue
            local = f"model.layers.{int(number) - layers.start}.{rest}"
        elif name == "model.embed_tokens.weight":
            if not place.first and not (place.last and config.tie_word_embeddings):
                continue
        elif not place.last:  # the final norm and the head
            continue
        if (cut := _cut(config, place, name, shape)) is not None:
            found[name] = (local, cut)
    return found


def _cut(config: ModelConfig, place: Place, name: str, shape: tuple[int, ...]) -> Slices | None:
    def share(n: int) -> slice:
        each = n // place.tp
        return slice(place.tp_rank * each, (place.tp_rank + 1) * each)

    whole: Slices = (ALL,) * len(shape)
    if place.tp == 1:
        return whole
    if ".k_proj." in name or ".v_proj." in name:
        heads = kv_heads(config, place)
        return (slice(heads.start * config.head_dim, heads.stop * config.head_dim), *whole[1:])
    if any(part in name for part in (".q_proj.", ".gate_proj.", ".up_proj.", "embed_tokens.", "lm_head.")):
        return (share(shape[0]), *whole[1:])
    if ".o_proj." in name or ".down_proj." in name:
        if name.endswith(".bias"):
            return whole if place.tp_rank == 0 else None
        return (ALL, share(shape[1]))
    return whole  # norms
