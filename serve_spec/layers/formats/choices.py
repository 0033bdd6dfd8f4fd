"""Which format a matrix gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.fp16 import Fp16Weight
from serve_spec.layers.formats.onednn import OneDnnWeight
from serve_spec.layers.formats.plain import Conversion, PlainWeight

# What this machine multiplies floats fastest with, if not as they are.
_FASTEST: tuple[Conversion, ...] = (Fp16Weight.convert, OneDnnWeight.convert)


class PlainFormats(Formats):
    """Floats, in the layout that is fastest on this machine."""

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        return PlainWeight(matrix, _FASTEST)


PLAIN = PlainFormats()


class StoredFormats(Formats):
    """The formats of a file in which modules have other paths than in the model that reads it.

    stored: the path in the file, by that in the model. floats: paths in the model of those that
    are stored as floats, whatever the formats say: lists of skipped modules are often incomplete
    for the layers that draft.
    """

    def __init__(
        self, formats: Formats, stored: Mapping[str, str], floats: Collection[str]
    ) -> None:
        self._formats = formats
        self._stored = stored
        self._floats = floats

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        if all(path in self._floats for path in paths):
            return PLAIN.of(paths, matrix)
        return self._formats.of([self._stored.get(path, path) for path in paths], matrix)


class ConvertedFormats(Formats):
    """Floats that are converted after loading; a matrix that `convert` does not take is `PLAIN`.

    Counts the matrices of both kinds, and the bytes of those converted.
    """

    def __init__(self, convert: Conversion) -> None:
        self.num_converted = self.num_plain = self.num_bytes = 0
        self._convert_weight = convert

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        return PlainWeight(matrix, (self._convert, *_FASTEST))

    def _convert(self, plain: PlainWeight) -> WeightFormat | None:
        converted = self._convert_weight(plain)
        if converted is None:
            self.num_plain += 1
            return None
        self.num_converted += 1
        self.num_bytes += converted.num_bytes
        return converted
