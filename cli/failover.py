"""``tally failover``: take the log of a dead node from its safekeepers, and chain what it had committed."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from app.runtime.logs import configure_logs
from app.runtime.settings.config import Settings, load_settings
from ledger.errors import ConfigurationError
from terminal.options import Json
from terminal.outcome import tell


def failover(
    node: Annotated[str, typer.Option("--node", help="The node whose log is taken.")],
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Go on with those safekeepers that answer, also without a majority: what only the others hold is "
            "given up, and _system says so.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Take the log of a dead node: win an epoch, fetch it, and chain all that was committed.

    A node that neither PostgreSQL nor a safekeeper knows is refused.

    Its lease is taken from whoever has it; a process that still writes that log
    is fenced and stops. Settings are those of the node: replication.members,
    wal.ack_mode, database_url; TALLY_DATA_DIR is where its log is put here.
    Afterwards the lease is free: a standby, or the node itself on a new disk,
    goes on with tally serve.

    --accept-loss is for a region that is gone: members of replication.members
    that answer are taken for all there are, and those of this process's region
    vote from now on.

    \b
    Examples:
      tally failover --node node-7f3a
      TALLY_REGION=eu1 tally failover --node node-7f3a --accept-loss
    """
    settings = load_settings(node_id=node)
    if not settings.wal.ack_mode.is_replicated:
        raise ConfigurationError(
            "wal.ack_mode is not REPLICATED_QUORUM or REPLICATED_ALL: from copies nobody may take over"
        )
    configure_logs()
    said = asyncio.run(_failover(settings, accept_loss))
    tell(
        said,
        f"epoch {said['epoch']} of {node} is won, all that was committed is chained: LSN {said['chained_lsn']}",
        as_json=as_json,
    )


async def _failover(settings: Settings, accept_loss: bool) -> dict[str, object]:
    from app.node.start.kept_copies import refuse_unknown
    from app.node.start.quorum import Takeover
    from app.node.wiring import running

    url = settings.database_url
    if url is None:
        raise ConfigurationError("database_url is not set: name the ledger's in TALLY_DATABASE_URL")
    assert settings.node_id is not None
    await refuse_unknown(settings, url, settings.node_id)
    takeover = Takeover.ACCEPTS_LOSS if accept_loss else Takeover.SEIZES
    async with running(settings, url, takeover=takeover) as (service, _):
        node = service.node
        await node.chained.reached(service.writer.durable_lsn, settings.write.timeout.total_seconds())
        return {
            "node_id": node.node_id,
            "epoch": node.epoch,
            "chained_lsn": node.chained.lsn,
            "accepted_loss": accept_loss,
        }
