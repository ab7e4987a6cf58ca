"""Lists the tensor-core GEMMs that are built with CUTLASS, by family and translation unit.

A family is one source file, ``csrc/cutlass/<family>.cu``. A translation unit compiles the source file of a family for
one input dtype and one output dtype. The source file gives each configuration a name, such as
``sm90_int8_bf16_pingpong_64x128``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.errors import MissingExtra

ELEMENTS = {
    "fp16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    "int8": "int8_t",
    "fp8_e4m3": "cutlass::float_e4m3_t",
}
Pair = tuple[str, str]
PLAIN: tuple[Pair, ...] = (("fp16", "fp16"), ("bf16", "bf16"))
INT8: tuple[Pair, ...] = (("int8", "fp16"), ("int8", "bf16"))
FP8: tuple[Pair, ...] = (("fp8_e4m3", "fp16"), ("fp8_e4m3", "bf16"))


@dataclass(frozen=True)
class Tile:
    """Describes a tile, with its size along M and N, its size along K in bytes, and its input dtypes."""

    m: int
    n: int
    k_bytes: int
    dtypes: tuple[str, ...] = tuple(ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a family, with its source file and its tiles.

    ``archs`` lists the architectures that the source file compiles for. ``least`` and ``most`` are the lowest and
    highest compute capability (90 for 9.0) on which the family runs. ``instructions`` maps each input dtype to the SASS
    instruction of the kernels.
    """

    name: str
    archs: tuple[str, ...]
    least: int
    most: int
    pairs: tuple[Pair, ...]
    tiles: dict[str, Tile]
    instructions: dict[str, str]


FAMILIES = (
    Family(
        name="sm80",
        archs=("sm_80", "sm_86", "sm_89", "sm_120", "sm_120a"),
        least=80,
        most=129,
        pairs=(*PLAIN, *INT8),
        tiles={
            "streamk_128x128": Tile(128, 128, 64),
            "streamk_128x256": Tile(128, 256, 64),
            "streamk_64x128": Tile(64, 128, 64),
            "streamk_64x64": Tile(64, 64, 128),
        },
        instructions={"fp16": "HMMA", "bf16": "HMMA", "int8": "IMMA"},
    ),
    Family(
        name="sm90",
        archs=("sm_90a",),
        least=90,
        most=90,
        pairs=(*PLAIN, *INT8, *FP8),
        tiles={
            "cooperative_128x128": Tile(128, 128, 128, dtypes=("fp8_e4m3",)),
            "cooperative_128x192": Tile(128, 192, 128, dtypes=("fp8_e4m3",)),
            "cooperative_256x128": Tile(256, 128, 128, dtypes=("fp16", "bf16", "int8")),
            "pingpong_128x128": Tile(128, 128, 128, dtypes=("fp16", "bf16", "int8")),
            "streamk_128x128": Tile(128, 128, 128, dtypes=("fp16", "bf16", "int8")),
            "pingpong_64x128": Tile(64, 128, 128, dtypes=("fp16", "bf16", "int8")),
            "pingpong_64x64": Tile(64, 64, 128),
            "swapped_64x16": Tile(16, 64, 128),
        },
        instructions={"fp16": "HGMMA", "bf16": "HGMMA", "int8": "IGMMA", "fp8_e4m3": "QGMMA"},
    ),
    Family(
        name="sm100",
        archs=("sm_100a",),
        least=100,
        most=100,
        pairs=(*PLAIN, *INT8, *FP8),
        tiles={
            "one_128x128": Tile(128, 128, 128),
            "one_128x256": Tile(128, 256, 128),
            "two_256x128": Tile(256, 128, 128),
            "two_256x256": Tile(256, 256, 128),
            "swapped_128x16": Tile(16, 128, 128),
        },
        instructions={"fp16": "UTCHMMA", "bf16": "UTCHMMA", "int8": "UTCIMMA", "fp8_e4m3": "UTCQMMA"},
    ),
    Family(
        name="sm120",
        archs=("sm_120a",),
        least=120,
        most=120,
        pairs=FP8,
        tiles={"cooperative_128x128": Tile(128, 128, 128), "cooperative_128x64": Tile(128, 64, 128)},
        instructions={"fp8_e4m3": "QMMA"},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Describes a translation unit, which compiles a family for one input dtype and one output dtype."""

    family: Family
    dtype: str
    out_dtype: str

    @property
    def dtypes(self) -> str:
        """Returns the part of a configuration's name that gives the input and output dtypes, such as ``fp16`` or
        ``int8_bf16``."""
        return self.dtype if self.dtype == self.out_dtype else f"{self.dtype}_{self.out_dtype}"

    @property
    def name(self) -> str:
        return f"{self.family.name}_{self.dtypes}"

    @property
    def source(self) -> str:
        return f"cutlass/{self.family.name}.cu"

    @property
    def tiles(self) -> list[str]:
        """Returns the names of the tiles that this unit has."""
        return [name for name, tile in self.family.tiles.items() if self.dtype in tile.dtypes]

    @property
    def flags(self) -> list[str]:
        """Returns the compiler flags that select this unit.

        The flag NDEBUG removes asserts, because the function call in an assert would serialize the wgmma instructions.
        """
        names = [f"-DACCEL_IN={ELEMENTS[self.dtype]}", f"-DACCEL_OUT={ELEMENTS[self.out_dtype]}"]
        names += ["-DACCEL_FP8_IN"] if self.dtype == "fp8_e4m3" else []
        return [*names, f'-DACCEL_UNIT="{self.dtypes}"', "-DNDEBUG", "--expt-relaxed-constexpr"]


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """Describes a configuration of the compiled library, which is one tile of a translation unit. ``block_m`` and
    ``block_n`` are the rows and columns of the output that a tile covers."""

    unit: Unit
    tile: str

    @property
    def name(self) -> str:
        return f"{self.unit.name}_{self.tile}"

    @property
    def block_m(self) -> int:
        return self.unit.family.tiles[self.tile].m

    @property
    def block_n(self) -> int:
        return self.unit.family.tiles[self.tile].n

    @property
    def block_k_bytes(self) -> int:
        return self.unit.family.tiles[self.tile].k_bytes

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Tells whether this tile runs on this compute capability. Assumes that the library is compiled for all
        architectures of the family."""
        return any(has_code_for(arch, capability) for arch in self.unit.family.archs)


UNITS = tuple(Unit(family=f, dtype=i, out_dtype=o) for f in FAMILIES for i, o in f.pairs)
NATIVE = {c.name: c for u in UNITS for c in (NativeConfig(unit=u, tile=tile) for tile in u.tiles)}


def has_code_for(arch: str, capability: tuple[int, int]) -> bool:
    """Tells whether code for ``arch`` runs on a GPU of this compute capability. Code for sm_86 runs on compute
    capability 8.6 to 8.9, and code for sm_90a only on 9.0."""
    major, minor = divmod(int(arch.removeprefix("sm_").removesuffix("a")), 10)
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def units_for(archs: Sequence[str]) -> Iterator[tuple[Unit, tuple[str, ...]]]:
    """Yields each unit of a library for ``archs``, together with the architectures that the unit is compiled for."""
    for unit in UNITS:
        wanted = tuple(arch for arch in unit.family.archs if arch in archs)
        if wanted:
            yield unit, wanted


def cutlass_includes() -> list[Path]:
    """Returns the folders of the CUTLASS headers. Raises ``MissingExtra`` if the CUTLASS package isn't installed."""
    found = importlib.util.find_spec("cutlass_library")
    if found is None or found.origin is None:
        raise MissingExtra("nvidia-cutlass", "kernels")
    source = Path(found.origin).parent / "source"
    return [source / "include", source / "tools" / "util" / "include"]
