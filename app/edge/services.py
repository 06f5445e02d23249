"""How a route names the services that it uses: ``jobs: Service[JobReader]`` in its signature.

``app.node.wiring`` makes one object of each kind. The application refuses to begin without one that a route names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

from fastapi import Depends
from starlette.requests import Request

from app.edge.library_internals import Dependant

Kind = TypeVar("Kind")
Services: TypeAlias = Mapping[Any, Any]
"""By its kind, a class or a union of classes, each service that a route can name."""
_KIND: Final = "service_kind"


@cache
def service(kind: Any) -> Callable[[Request], Awaitable[Any]]:
    """The dependency that is the service of this kind."""

    async def named(request: Request) -> Any:
        return request.scope["app"].state.services[kind]

    setattr(named, _KIND, kind)
    return named


if TYPE_CHECKING:
    Service = Annotated[Kind, "a service"]
else:

    class Service:
        """``Service[Kind]`` annotates a parameter of a route, or of a dependency, with the service of that kind."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, Depends(service(kind))]


def kinds_named_by(dependant: Dependant) -> Iterator[Any]:
    """The kinds of service that an endpoint names, by itself or through its dependencies."""
    for part in dependant.dependencies:
        if hasattr(part.call, _KIND):
            yield getattr(part.call, _KIND)
        yield from kinds_named_by(part)
