"""What goes wrong in a simulation: all of it drawn from the seed. Then nothing does any more, and a writer must be
elected, commit, chain, and have every member keep all of it."""

from __future__ import annotations

from collections.abc import Callable

from ledger.positions import Lsn
from tests.wal.replication.simulation.database import Database
from tests.wal.replication.simulation.member import Member
from tests.wal.replication.simulation.network import Network
from tests.wal.replication.simulation.oracle import Oracle, ViolationError
from tests.wal.replication.simulation.site import Site
from tests.wal.replication.simulation.world import Process, World
from wal.replication.configuration import AckMode, Configuration

HOME, AWAY = "use1", "usw2"
FAULTS_S = 12.0
"""So long something goes wrong."""
RECOVERY_S = 40.0
"""In so long all is well again."""
RUN_S = 12.0
"""In so long one run makes it so, or gives up."""
MODES = (AckMode.REPLICATED_QUORUM, AckMode.REPLICATED_ALL, AckMode.LOCAL_GROUP_SYNC)


class Scenario:
    def __init__(self, seed: int, damage: float = 0.0) -> None:
        """``damage``: the chance that a frame arrives with a bit flipped."""
        self.world = world = World(seed)
        self.oracle = Oracle()
        self.network = Network(world)
        self.network.damage = damage
        self.database = Database(self.oracle)
        rng = world.rng
        regions = [HOME] * rng.choice((3, 3, 3, 5)) + [AWAY] * rng.choice((0, 0, 1, 2))
        self.members = {
            name: Member(world, name, region, self.oracle) for name, region in zip("abcdefg", regions, strict=False)
        }
        self.sites = [
            Site(world, f"site{number}", self.network, self.database, self.oracle, HOME)
            for number in range(rng.choice((1, 2, 2, 3)))
        ]
        self.spares = [Member(world, name, HOME, self.oracle) for name in "xyz"[: rng.choice((0, 0, 1, 3))]]
        self.mode = rng.choices(MODES, (6, 1, 2))[0]
        self.changes_mode = world.happens(0.4)
        self.wipes = world.happens(0.5)
        self.trims = world.happens(0.3)
        self.network.stray = rng.choice((0.0, 0.0, 0.01, 0.05))
        self.network.loss = rng.choice((0.0, 0.0, 0.0, 0.002, 0.01))
        self.fault_every_s = rng.choice((0.05, 0.1, 0.25, 0.5))
        churn = rng.choice((1, 1, 4))
        self.retired: list[Member] = []
        self._outdated = self.members
        """What a run may still be told of who the members are."""
        self.is_over = False
        self._faults: list[tuple[Callable[[], None], int]] = [
            (self._crash_member, 4),
            (self._pause_something, 3),
            (self._cut_network, 5),
            (self._slow_network, 2),
            (self._crash_site, 3 * churn),
            (self._start_site, 4 * churn),
            (self._jump_clock, 1),
            (self._slow_disk, 1),
            (self._wipe_member, 2 if self.wipes else 0),
            (self._wipe_site, 1 if self.wipes else 0),
            (self._replace_member, 4 if self.spares else 0),
            (self._change_mode, 4 if self.changes_mode else 0),
            (self._trim, 3 if self.trims else 0),
        ]

    def run(self) -> None:
        """
        Raises:
            ViolationError: what must hold did not.
        """
        world = self.world
        self._start(self.sites[0])
        world.later(0.02, self._write)
        world.later(self.fault_every_s, self._fault)
        world.run(FAULTS_S)
        self._heal()
        self._must_recover()

    # --- what goes on -----------------------------------------------------------------------------

    def _write(self) -> None:
        for site in self.sites:
            if self.world.happens(0.8):
                site.write_soon(self.world.rng.randint(1, 3))
        self.world.later(self.world.between(0.01, 0.12), self._write)

    def _start(self, site: Site) -> None:
        if not site.is_alive:
            is_outdated = not self.is_over and self.world.happens(0.3)
            site.start(self._outdated if is_outdated and not self._has_lost_voter() else self.members, self.mode)

    def _has_lost_voter(self) -> bool:
        """Whether one that votes by some list is on no disk any more: then nobody brings back who was replaced."""
        there = {each.member_id for each in (*self.members.values(), *self.retired)}
        return any(not listed.voters <= there for listed in self._lists())

    # --- what goes wrong --------------------------------------------------------------------------

    def _fault(self) -> None:
        if self.is_over:
            return
        faults = [fault for fault, _ in self._faults]
        self.world.rng.choices(faults, [weight for _, weight in self._faults])[0]()
        self.world.later(self.world.between(0.0, 2 * self.fault_every_s), self._fault)

    def _unless_over(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.later(delay_s, lambda: None if self.is_over else act())

    def _a_member(self) -> Member:
        return self.world.rng.choice(list(self.members.values()))

    def _a_site(self) -> Site:
        return self.world.rng.choice(self.sites)

    def _crash_member(self) -> None:
        member = self._a_member()
        if not member.is_alive:
            return
        if self.world.happens(0.5):
            member.disk.crash_in = self.world.rng.randint(0, 6)
        else:
            member.crash()
        self._unless_over(self.world.between(0.1, 2.5), lambda: self._restart(member))

    def _restart(self, member: Member) -> None:
        if not member.is_alive:
            self.world.say(f"{member.name} starts")
            member.start()

    def _wipe_member(self) -> None:
        member = self._a_member()
        if self._can_do_without(member):
            member.wipe()
            self._unless_over(self.world.between(0.1, 1.5), lambda: self._restart(member))

    def _can_do_without(self, member: Member) -> bool:
        """Whether the others are a majority by every list that may come to count, also once it has this member, too."""
        left = frozenset({each.member_id for each in self.members.values()} - {member.member_id})
        lists = [listed.voters | {member.member_id} for listed in self._lists() if listed.is_quorum]
        told = [site.members for site in self.sites if site.is_alive]
        to_come = [{each.member_id for each in members.values() if each.region == HOME} for members in told]
        return all(len(member_ids & left) > len(member_ids) // 2 for member_ids in (*lists, *to_come))

    def _replace_member(self) -> None:
        """Another takes the place of a member, which runs on: for those who start from now on."""
        member = self._a_member()
        there = {each.member_id for each in self.members.values()}
        has_lost = any(not listed.voters <= there for listed in self._lists())
        if self.spares and member.region == HOME and not has_lost and self._can_do_without(member):
            spare = self.spares.pop()
            self.world.say(f"{spare.name} takes the place of {member.name}")
            self._outdated = self.members
            self.members = {name: each for name, each in self.members.items() if each is not member}
            self.members[spare.name] = spare
            self.retired.append(member)

    def _lists(self) -> list[Configuration]:
        """Every list of members that anybody holds, or is about to."""
        places: list[Member | Site] = [*self.members.values(), *self.spares, *self.retired, *self.sites]
        lists = [place.disk.configuration for place in places]
        for site in self.sites:
            if site.is_alive and site.proposer is not None:
                lists.append(site.proposer.configuration)
                if site.proposer._pending is not None:
                    lists.append(site.proposer._pending)
        return lists

    def _wipe_site(self) -> None:
        """Only where the members are a quorum: else what is committed is nowhere else."""
        site = self._a_site()
        own = site.disk.configuration
        told = {each.member_id for each in self.members.values() if each.disk.configuration.order >= own.order}
        is_owner = self.database.row.disk in ("", site.disk.control.member_id)
        newest = max(self._lists(), key=lambda listed: listed.order)
        if not is_owner or (newest.is_quorum and own.has_majority(frozenset(told))):
            site.crash()
            site.disk.wipe()

    def _pause_something(self) -> None:
        places: list[Process] = [*self.members.values(), *self.sites, *self.sites]
        process = self.world.rng.choice(places)
        if process.is_alive and not process.is_paused:
            self.world.say(f"{process.name} is paused")
            process.pause()
            self.world.later(self.world.between(0.1, 4.0), lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.is_paused:
            self.world.say(f"{process.name} goes on")
            process.resume()

    def _jump_clock(self) -> None:
        self.world.rng.choice([*self.members.values(), *self.sites]).jump_clock()

    def _cut_network(self) -> None:
        rng = self.world.rng
        names = [*self.members, *(place.name for place in (*self.spares, *self.retired, *self.sites))]
        cut: set[tuple[str, str]] = set()
        kind = rng.choice(("host", "host", "one-way", "split"))
        if kind == "split":
            side = {name for name in names if self.world.happens(0.5)}
            cut = {(a, b) for a in names for b in names if (a in side) != (b in side)}
        else:
            host = rng.choice(names)
            cut = {(host, name) for name in names}
            if kind == "host":
                cut |= {(name, host) for name in names}
        self.world.say(f"network: {kind} {sorted({a for a, _ in cut})}")
        self.network.blocked |= cut
        self.world.later(self.world.between(0.2, 3.0), lambda: self._mend(cut))

    def _mend(self, cut: set[tuple[str, str]]) -> None:
        self.network.blocked -= cut

    def _slow_network(self) -> None:
        site, member = self._a_site().name, self._a_member().name
        ways = ((site, member), (member, site))
        way = self.world.rng.choice(ways)
        self.network.extra_s[way] = self.world.between(0.02, 0.5)
        self.world.later(self.world.between(0.5, 3.0), lambda: self.network.extra_s.pop(way, None))

    def _slow_disk(self) -> None:
        place = self.world.rng.choice([*self.members.values(), *self.sites])
        usual = place.sync_s
        place.sync_s = self.world.between(0.02, 0.2)

        def mend() -> None:
            place.sync_s = min(usual, 0.002)

        self.world.later(self.world.between(0.5, 3.0), mend)

    def _crash_site(self) -> None:
        site = self._a_site()
        if not site.is_alive:
            return
        if self.world.happens(0.5):
            site.disk.crash_in = self.world.rng.randint(0, 6)
        else:
            site.crash()
        if self.world.happens(0.7):
            other = self._a_site()
            self._unless_over(self.world.between(0.05, 1.0), lambda: self._start(other))

    def _start_site(self) -> None:
        """A takeover, whether or not somebody writes; it may be a short one."""
        site = self._a_site()
        if not site.is_alive and self.world.happens(0.4):
            site.disk.crash_in = self.world.rng.randint(1, 12)
        self._start(site)

    def _change_mode(self) -> None:
        self.mode = self.world.rng.choice(MODES)
        writing = [site for site in self.sites if site.is_alive and site.proposer is not None]
        for site in writing:
            site.crash()
            self._unless_over(self.world.between(0.05, 0.5), lambda site=site: self._start(site))

    def _trim(self) -> None:
        """What was chained is archived, and dropped somewhere."""
        place = self.world.rng.choice([*self.members.values(), *self.sites])
        lsn = self.database.row.chained_lsn
        place.disk.trim(Lsn(min(lsn, place.disk.control.durable_lsn) + 1 - self.world.rng.randint(0, 4)))

    # --- when nothing does any more -----------------------------------------------------------------

    def _heal(self) -> None:
        self.is_over = True
        self.world.say("--- nothing goes wrong any more")
        network = self.network
        network.blocked, network.extra_s, network.loss, network.stray = set(), {}, 0.0, 0.0
        for place in (*self.members.values(), *self.sites):
            place.disk.crash_in = None
            place.sync_s = 0.001
            if place.is_paused:
                place.resume()
        for site in self.sites:
            site.disk.crash_in = None
            site.crash()
        for member in self.members.values():
            member.disk.crash_in = None
            self._restart(member)

    def _must_recover(self) -> None:
        """One run after the other, as by a lease, until one has made it."""
        ends_s = self.world.now_s + RECOVERY_S
        number = 0
        while self.world.now_s < ends_s:
            site = self.sites[number % len(self.sites)]
            number += 1
            self._start(site)
            at_s = self.world.now_s
            self._goal_lsn: Lsn | None = None
            if self.world.run(at_s + RUN_S, lambda site=site: self._is_well(site)):
                return
            if site.is_alive:
                raise ViolationError(f"{site.name} makes no progress: {self._state_of(site)}")
            self.world.run(self.world.now_s + 0.3)
        raise ViolationError(f"no writer in {RECOVERY_S} s without a fault")

    def _is_well(self, site: Site) -> bool:
        """Or its run ended, which is not well but over."""
        return self._has_all(site)

    def _has_all(self, site: Site) -> bool:
        if not site.is_alive or site.proposer is None:
            return False
        if self._goal_lsn is None:
            self._goal_lsn = Lsn(site.log.tail.lsn + 2)
        proposer = site.proposer
        if self.database.row.chained_lsn < self._goal_lsn or proposer.committed_lsn < self._goal_lsn:
            return False
        listed = {member.member_id for member in proposer.configuration.members}
        if not self.mode.is_replicated:
            listed &= {member.member_id for member in self.members.values()}
        return (
            all(member.disk.last_lsn >= self._goal_lsn for member in self.members.values())
            and listed == {member.member_id for member in self.members.values()}
            and proposer.configuration.copies != self.mode.is_replicated
        )

    def _state_of(self, site: Site) -> str:
        if site.proposer is None:
            return "no proposer"
        links = {address: (link.is_streaming, link.replicated_lsn) for address, link in site.proposer.links.items()}
        return (
            f"goal {self._goal_lsn}, committed {site.proposer.committed_lsn}, chained {self.database.row.chained_lsn}, "
            f"links {links}, list {site.proposer.configuration}, pending {site.proposer._pending}"
        )
