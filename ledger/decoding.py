"""Values of declared forms, read by msgspec.

msgspec prepares a struct type at its first use and takes no lock for it: a second thread that uses the type meanwhile
reads what is not there yet, which ends the process (seen with msgspec 0.22). So each type is prepared here, under one
lock, before it is used.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_preparing = threading.Lock()


def decoder_of(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """The decoder of JSON into this type, the same at each call."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _preparing:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def decode(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """The value of this type in JSON.

    Raises:
        msgspec.DecodeError: it is no JSON.
        msgspec.ValidationError: it is of another form.
    """
    return decoder_of(kind).decode(data)


def decode_packed(data: bytes, kind: type[_Kind]) -> _Kind:
    """The value of this type in MessagePack.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: as ``decode``.
    """
    decoder_of(kind)
    return msgspec.msgpack.decode(data, type=kind)


def convert(value: object, kind: type[_Kind]) -> _Kind:
    """A value of plain objects as this type.

    Raises:
        msgspec.ValidationError: it is of another form.
    """
    decoder_of(kind)
    return msgspec.convert(value, kind)
