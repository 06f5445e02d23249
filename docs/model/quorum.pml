/* A log that several members keep: the protocol of wal/replication, for the model checker Spin.
 *
 * README.md beside this file says what is modelled, what is not, within which bounds, and what was found.
 *
 * One step is one message handled, or one thing that happens; all are atomic, in any order. A message may be handled at
 * any time, late, twice, or never: so nothing is sent, and whoever handles one looks at what its sender has to say.
 *
 * A run of a node is known by its number, from 1, in the order in which they start; a record by the run that wrote it.
 * Each rule is left out by a switch, "OUT" and a name: then an assertion fails.
 */

/* --- bounds ------------------------------------------------------------------------------------------------------- */

#ifndef MEMBERS
#define MEMBERS 3       /* copies of the log that vote, or may come to; 3 to 5 */
#endif
#ifndef RUNS
#define RUNS 3          /* runs of the proposer, so as many epochs at most */
#endif
#ifndef RECORDS
#define RECORDS 2       /* LSNs; the first record of each epoch is one of them */
#endif
#ifndef NODES
#define NODES 2         /* machines on which runs start, each with a copy of its own, which may be lost */
#endif

/* With -DCHANGES the list of members changes. It begins as VOTERS, a set of bits. A run finds members at ADDRESSES or,
 * where its settings are newer, at NEW_ADDRESSES: any run, or with -DNEW_RUNS just the runs of that set. With -DWIPED_MAX=n so many members lose their disk. With -DLATE answers
 * are lost besides; where the list stays as it is, that adds nothing (README.md). */
#ifndef VOTERS
#define VOTERS ((1 << MEMBERS) - 1)
#endif
#ifndef ADDRESSES
#define ADDRESSES ((1 << MEMBERS) - 1)
#endif
#ifndef NEW_ADDRESSES
#define NEW_ADDRESSES ADDRESSES
#endif
#ifndef WIPED_MAX
#define WIPED_MAX 0
#endif

/* With -DNEVER_COUNTED=m a run before has stored a list in which member m votes as well, at that member alone. */

/* So many records at most are left in the copy of a node whose run was killed. */
#ifndef LEFT_MAX
#define LEFT_MAX RECORDS
#endif

/* --- what there is ------------------------------------------------------------------------------------------------ */

#define NOBODY 0

typedef Member {
  byte log[RECORDS];    /* which run wrote LSN i + 1 */
  byte length;
  byte promised;        /* the run that it promised to follow, and so an epoch */
  byte elected;         /* the run whose history was applied since the last restart; not durable */
  short list;           /* the list of members, as stored here */
}

#define IDLE     0
#define ELECTING 1
#define WRITING  2
#define OVER     3

typedef Run {
  byte state;
  byte node;
  byte epoch;
  byte addresses;
  short list;           /* the list of members that counts */
  byte promises;        /* ELECTING: members who promised; and the last record of each: who wrote it, and its LSN */
  byte tail_run[MEMBERS];
  byte tail_length[MEMBERS];
  byte log[RECORDS];    /* WRITING: the log of this run; it stays known when the run is over */
  byte first;           /* LSN of its first record */
  byte written;
  byte committed;
  byte held[MEMBERS];   /* up to here the member said that it holds the log durably */
  short pending;        /* a list that is being stored, and by whom it is */
  byte stored;
}

typedef Node {          /* its copy, while no run writes there: the log of the run of its last record, up to that */
  byte last_run;
  byte length;
  short list;
}

Member member[MEMBERS];
Run runs[RUNS + 1];     /* runs[NOBODY] has epoch 0 and writes nothing */
Node node[NODES];
byte wiped;             /* members whose disk is gone, and their ids with it */

hidden byte i, j, k;    /* counters, and values, within one step */
hidden byte common, best, length;

#define M member[m]
#define R runs[r]
#define OWN node[R.node]
#define EPOCH(r) runs[r].epoch

#define BIT(m) (1 << (m))
#define HAS(set, m) (((set) >> (m)) & 1)
#define COUNT(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2) + HAS(set, 3) + HAS(set, 4))

/* A list says who votes, and has an order by (epoch, generation). */
#define LIST(epoch, generation, voters) ((epoch) << 10 | (generation) << 6 | (voters))
#define ORDER(list) ((list) >> 6)
#define EPOCH_OF(list) ((list) >> 10)
#define GENERATION_OF(list) (((list) >> 6) & 15)
#define VOTERS_OF(list) ((list) & 63)
#define IS_MAJORITY(set, list) (2 * COUNT((set) & VOTERS_OF(list)) > COUNT(VOTERS_OF(list)))

/* --- what must always be true ------------------------------------------------------------------------------------- */

/* An epoch has one writer. What a run committed is in the log of every run of a later epoch, at the same LSN: so it never
 * changes nor disappears, and what any two commit is the same as far as both did. */
inline check_runs() {
  for (j : 1 .. RUNS - 1) {
    for (k : j + 1 .. RUNS) {
      if
      :: runs[j].first && runs[k].first ->
           assert(EPOCH(j) < EPOCH(k));                                             /* one writer an epoch */
           for (i : 0 .. RECORDS - 1) {
             assert(i >= runs[j].committed || runs[k].log[i] == runs[j].log[i])     /* committed is kept */
           }
      :: else
      fi
    }
  }
  i = 0; j = 0; k = 0
}

/* Two copies that have the same record at an LSN have the same before it: that is why histories are enough to tell where
 * two logs part (last_common in wal/control.py), and why a tail tells a whole log here. */
inline check_log(m) {
  for (i : 0 .. RECORDS - 1) {
    assert(i >= M.length || M.log[i] == runs[M.log[M.length - 1]].log[i])           /* same record, same log */
  }
  i = 0
}

/* Whoever cuts the end of its log cuts nothing that any run has committed. */
inline check_cut(m, length_) {
  for (j : 1 .. RUNS) {
    for (i : 0 .. RECORDS - 1) {
      assert(i < length_ || i >= M.length || i >= runs[j].committed ||
             EPOCH(j) > EPOCH(r) || M.log[i] != runs[j].log[i])                     /* committed is not cut */
    }
  }
  i = 0; j = 0
}

/* --- rules of the acceptor: member m is told something by run r --------------------------------------------------- */

#if defined(OUT_HIGHER)         /* only a higher epoch than any promised is promised, or the same */
#define MAY_PROMISE (M.promised != r)
#elif defined(OUT_SAME_RUN)     /* and the same one only to the same run */
#define MAY_PROMISE (EPOCH(r) >= EPOCH(M.promised) && M.promised != r)
#else
#define MAY_PROMISE (EPOCH(r) > EPOCH(M.promised))
#endif

#ifdef OUT_FENCE                /* from then on nobody else is listened to */
#define IS_PROMISED (M.promised != NOBODY)
#else
#define IS_PROMISED (M.promised == r)
#endif

#ifdef OUT_ELECTED              /* nothing is appended or acknowledged before the history of the epoch was applied */
#define IS_APPLIED true
#else
#define IS_APPLIED (M.elected == r)
#endif

#ifdef OUT_PREVIOUS             /* a batch names the epoch and the LSN before it, and fits or is refused */
#define FITS(lsn) (M.length < (lsn))
#else
#define FITS(lsn) \
  (M.length + 1 == (lsn) && (M.length == 0 || EPOCH(M.log[M.length - 1]) == EPOCH(R.log[M.length - 1])))
#endif

/* --- rules of the election ---------------------------------------------------------------------------------------- */

#ifdef OUT_PROMISES             /* a majority of the voters promises */
#define HAS_PROMISES (2 * COUNT(R.promises & VOTERS_OF(R.list)) >= COUNT(VOTERS_OF(R.list)) - 1)
#else
#define HAS_PROMISES IS_MAJORITY(R.promises, R.list)
#endif

#ifdef OUT_LAST_EPOCH           /* the best log is the highest (epoch of its last record, LSN), never the LSN alone */
#define IS_BETTER(run_a, length_a, run_b, length_b) (length_a > length_b)
#else
#define IS_BETTER(run_a, length_a, run_b, length_b) \
  (EPOCH(run_a) > EPOCH(run_b) || (EPOCH(run_a) == EPOCH(run_b) && length_a > length_b))
#endif

/* --- rules of the proposer ---------------------------------------------------------------------------------------- */

#define HOLDS(m, lsn) ((R.held[m] >= (lsn)) << m)
#if MEMBERS == 3
#define HOLDERS(lsn) (HOLDS(0, lsn) | HOLDS(1, lsn) | HOLDS(2, lsn))
#elif MEMBERS == 4
#define HOLDERS(lsn) (HOLDS(0, lsn) | HOLDS(1, lsn) | HOLDS(2, lsn) | HOLDS(3, lsn))
#else
#define HOLDERS(lsn) (HOLDS(0, lsn) | HOLDS(1, lsn) | HOLDS(2, lsn) | HOLDS(3, lsn) | HOLDS(4, lsn))
#endif

#ifdef OUT_MAJORITY             /* committed is what a majority of the voters holds */
#define IS_HELD(lsn, list) (2 * COUNT(HOLDERS(lsn) & VOTERS_OF(list)) >= COUNT(VOTERS_OF(list)) - 1)
#else
#define IS_HELD(lsn, list) IS_MAJORITY(HOLDERS(lsn), list)
#endif

#ifdef OUT_OWN_EPOCH            /* and nothing before the first record of the own epoch is */
#define MAY_COMMIT(lsn) true
#else
#define MAY_COMMIT(lsn) ((lsn) >= R.first)
#endif

inline commit(r) {
  for (i : 1 .. RECORDS) {
    if
    :: i > R.committed && i <= R.written && MAY_COMMIT(i) && IS_HELD(i, R.list) -> R.committed = i
    :: else
    fi
  }
  i = 0;
  check_runs()
}

#ifdef CHANGES

#ifdef OUT_FIRST_COMMIT         /* the list changes only once a record of the own epoch is committed */
#define HAS_COMMITTED true
#else
#define HAS_COMMITTED (R.committed >= R.first)
#endif

#ifdef OUT_STILL_HELD           /* and what is committed stays held by a majority, also of the list to come */
#define STAYS_HELD(list) true
#else
#define STAYS_HELD(list) (R.committed == 0 || IS_HELD(R.committed, list))
#endif

#ifdef OUT_STORED               /* a list counts once a majority of the voters has stored it, the old and the new */
#define IS_STORED true
#else
#define IS_STORED (IS_MAJORITY(R.stored, R.list) && IS_MAJORITY(R.stored, R.pending))
#endif

#define FOLLOWING(voters) LIST(EPOCH(r), GENERATION_OF(R.list) + 1, voters)
#define MAY_CHANGE (R.state == WRITING && R.pending == 0 && HAS_COMMITTED)

inline change(r, voters) {
  R.pending = FOLLOWING(voters);
  R.stored = 0;
  assert(GENERATION_OF(R.pending) > 0)                                              /* within what a list can count */
}

#endif

/* --- messages between member m and run r -------------------------------------------------------------------------- */

#ifdef OUT_NEW_ID               /* who has lost the log has another id, and does not vote */
#define IS_GONE(m) false
#else
#define IS_GONE(m) HAS(wiped, m)
#endif

#define TALKS (HAS(R.addresses, m) && !IS_GONE(m))

/* Members that have not done anything yet are alike where they have one role: the lower number goes first, which leaves
 * out nothing but names. */
#define ROLE(m) (HAS(VOTERS, m) | HAS(ADDRESSES, m) << 1 | HAS(NEW_ADDRESSES, m) << 2)
#define IN_ORDER (m == 0 || ROLE(m - 1) != ROLE(m) || member[m - 1].promised || HAS(wiped, m - 1))

/* The list that a Prepare carries. Who knows a newer one refuses it. */
#define TOLD (R.pending -> R.pending : R.list)

inline promise(m, r) {
  M.list = TOLD;
  M.promised = r;
  M.elected = NOBODY
}

inline find_common(m, r) {      /* the LSN up to which the log of the member is that of the run */
  common = 0;
  for (i : 0 .. RECORDS - 1) {
    if
    :: i < M.length && i == common && EPOCH(M.log[i]) == EPOCH(R.log[i]) -> common++
    :: else
    fi
  }
  i = 0
}

inline cut(m, length_) {
  check_cut(m, length_);
  for (i : 0 .. RECORDS - 1) {
    if :: i >= length_ -> M.log[i] = NOBODY :: else fi
  }
  i = 0;
  M.length = length_
}

inline acknowledge(m, r) {      /* what Ready and Ack say */
  R.held[m] = M.length;
  commit(r)
}

proctype Link(byte m, r) {
end:
  do
  :: d_step { /* Prepare, and the Promise that answers it */
       R.state == ELECTING && TALKS && IN_ORDER && MAY_PROMISE && ORDER(M.list) <= ORDER(R.list) ->
         check_log(m);
         promise(m, r);
         R.promises = R.promises | BIT(m);
         R.tail_length[m] = M.length;
         R.tail_run[m] = (M.length -> M.log[M.length - 1] : NOBODY)
     }

  :: d_step { /* Prepare, of who has won already; the answer to it changes nothing */
       R.state == WRITING && TALKS && IN_ORDER && MAY_PROMISE && ORDER(M.list) <= ORDER(TOLD) ->
         promise(m, r)
     }

  :: d_step { /* Elected: the divergent tail goes */
       R.state == WRITING && TALKS && IS_PROMISED && M.elected != r ->
         find_common(m, r);
#ifndef OUT_TRUNCATE
         cut(m, common);
#endif
         common = 0;
         M.elected = r;
         acknowledge(m, r)
     }

  :: d_step { /* Elected, and a kill in the middle of the cut: one record of the tail is gone, or more by and by */
       R.state == WRITING && TALKS && IS_PROMISED && M.elected != r && M.length > 0 &&
       EPOCH(M.log[M.length - 1]) != EPOCH(R.log[M.length - 1]) ->
         cut(m, M.length - 1);
#ifdef OUT_REPEAT               /* the cut is repeated after the restart */
         M.elected = r
#else
         M.elected = NOBODY
#endif
     }

  :: d_step { /* Append of one record, and the Ack */
       R.state == WRITING && TALKS && IS_PROMISED && IS_APPLIED && M.length < R.written && FITS(M.length + 1) ->
         M.log[M.length] = R.log[M.length];
         M.length++;
         acknowledge(m, r)
     }

#ifdef OUT_PREVIOUS
  :: d_step { /* Append of the record after that */
       R.state == WRITING && TALKS && IS_PROMISED && IS_APPLIED && FITS(M.length + 2) && M.length + 2 <= R.written ->
         M.length = M.length + 2;
         M.log[M.length - 1] = R.log[M.length - 1];
         acknowledge(m, r)
     }
#endif

  :: d_step { /* Append without a record, and the Ack */
       R.state == WRITING && TALKS && IS_PROMISED && IS_APPLIED && R.held[m] != M.length ->
         acknowledge(m, r)
     }

#ifdef CHANGES
  :: d_step { /* Greet: a candidate learns a newer list */
       R.state == ELECTING && TALKS && ORDER(M.list) > ORDER(R.list) ->
         R.list = M.list
     }

#ifdef LATE
  :: d_step { /* Prepare, and the Promise is lost; the member knows the list all the same */
       R.state == ELECTING && TALKS && MAY_PROMISE && ORDER(M.list) < ORDER(R.list) ->
         promise(m, r)
     }

  :: d_step { /* Append, and the Ack is late: it comes with the next, or not at all */
       R.state == WRITING && TALKS && IS_PROMISED && IS_APPLIED && M.length < R.written && FITS(M.length + 1) ->
         M.log[M.length] = R.log[M.length];
         M.length++
     }
#endif

  :: d_step { /* Configure and Configured */
       R.state == WRITING && TALKS && IS_PROMISED && IS_APPLIED && R.pending && !HAS(R.stored, m) &&
       ORDER(M.list) <= ORDER(R.pending) ->
         M.list = R.pending;
         R.stored = R.stored | BIT(m)
     }

  :: d_step { /* the run would have a member that caught up vote */
       MAY_CHANGE && !HAS(R.list, m) && TALKS && M.promised == r && M.elected == r &&
       R.held[m] >= R.first && R.held[m] >= R.committed && STAYS_HELD(FOLLOWING(VOTERS_OF(R.list) | BIT(m))) ->
         change(r, VOTERS_OF(R.list) | BIT(m))
     }

  :: d_step { /* the run would have one go that is not at any address, or whose disk is gone */
       MAY_CHANGE && HAS(R.list, m) && !(HAS(R.addresses, m) && !HAS(wiped, m)) &&
       VOTERS_OF(R.list) != BIT(m) && STAYS_HELD(FOLLOWING(VOTERS_OF(R.list) & ~BIT(m))) ->
         change(r, VOTERS_OF(R.list) & ~BIT(m))
     }

#ifdef OUT_ONE                  /* one voter more, or one less */
  :: d_step { /* everybody shall vote */
       MAY_CHANGE && VOTERS_OF(R.list) != BIT(MEMBERS) - 1 ->
         change(r, BIT(MEMBERS) - 1)
     }
#endif
#endif
  od
}

/* --- the disk of member m ----------------------------------------------------------------------------------------- */

#if defined(OUT_SYNC) || defined(OUT_DURABLE) || defined(RESTARTS) || WIPED_MAX
proctype Disk(byte m) {
end:
  do
#if defined(RESTARTS) || defined(OUT_DURABLE)
  :: d_step { /* a restart: what is not durable is forgotten */
       M.promised != NOBODY && !HAS(wiped, m) ->
#ifdef OUT_DURABLE              /* a promise is durable before it is answered */
         M.promised = NOBODY;
#endif
         M.elected = NOBODY
     }
#endif
#ifdef OUT_SYNC                 /* what is acknowledged is durable */
  :: d_step { /* a restart, and the last record is gone */
       M.length > 0 ->
         M.length--;
         M.log[M.length] = NOBODY;
         M.elected = NOBODY
     }
#endif
#if WIPED_MAX
  :: d_step { /* the disk is lost; the empty one in its place has another id, so it is another member */
       COUNT(wiped) < WIPED_MAX && !HAS(wiped, m) && M.promised != NOBODY ->
         for (i : 0 .. RECORDS - 1) { M.log[i] = NOBODY }
         i = 0;
         M.length = 0; M.promised = NOBODY; M.elected = NOBODY;
#ifndef OUT_NEW_ID
         M.list = 0;
#endif
         wiped = wiped | BIT(m)
     }
#endif
  od
}
#endif

/* --- run r of the proposer ---------------------------------------------------------------------------------------- */

inline stop(r) {
  R.promises = 0;
  for (i : 0 .. MEMBERS - 1) { R.tail_run[i] = NOBODY; R.tail_length[i] = 0; R.held[i] = 0 }
  i = 0;
  R.pending = 0; R.stored = 0; R.list = 0; R.addresses = 0; R.written = 0; R.node = 0;
  R.state = OVER
}

/* The run that was on the node is killed. Its own copy is never counted on: any part of the log from the beginning on
 * may be left of it (nothing where the disk is lost, all but what was not synced, or as much as was fetched so far). */
inline kill(node_, left) {
  for (j : 1 .. RUNS) {
    if
    :: (runs[j].state == ELECTING || runs[j].state == WRITING) && runs[j].node == node_ ->
         if
         :: runs[j].state == WRITING ->
              node[node_].length = (left < runs[j].written -> left : runs[j].written);
              node[node_].last_run = (node[node_].length -> runs[j].log[node[node_].length - 1] : NOBODY)
         :: else
         fi;
#ifdef CHANGES
         if :: left == 0 -> node[node_].list = 0 :: else fi;
#endif
         stop(j)
    :: else
    fi
  }
  j = 0
}

inline start(r, node_, left, epoch_) {
  kill(node_, left);
  R.state = ELECTING;
  R.node = node_;
  R.epoch = epoch_;
  R.list = node[node_].list
}

/* The log that counts: the own one, or a better one of a voter who promised. */
inline find_best(r) {
  best = OWN.last_run; length = OWN.length;
#ifndef OUT_BEST                /* the own copy is not believed where there is a better one */
  for (i : 0 .. MEMBERS - 1) {
    if
    :: HAS(R.promises, i) && HAS(VOTERS_OF(R.list), i) && IS_BETTER(R.tail_run[i], R.tail_length[i], best, length) ->
         best = R.tail_run[i]; length = R.tail_length[i]
    :: else
    fi
  }
#endif
  for (i : 0 .. RECORDS - 1) {
    if :: i < length -> R.log[i] = runs[best].log[i] :: else fi
  }
  i = 0
}

proctype Proposer(byte r) {
  byte n, left;
end:
  do
  :: atomic { /* it starts, with the highest epoch that anybody took, or one more */
       R.state == IDLE && (r == 1 || runs[r - 1].state != IDLE) ->
         if
         :: n = 0
#if NODES > 1
         :: r > 1 -> n = 1
#endif
#if NODES > 2
         :: r > 2 -> n = 2
#endif
         fi;
         if
         :: left = 0
#if LEFT_MAX > 0
         :: left = 1
#endif
#if LEFT_MAX > 1
         :: left = 2
#endif
#if LEFT_MAX > 2
         :: left = 3
#endif
         fi;
#ifdef NEW_RUNS
         R.addresses = (HAS(NEW_RUNS, r) -> NEW_ADDRESSES : ADDRESSES);
#else
         if
         :: R.addresses = ADDRESSES
#if NEW_ADDRESSES != ADDRESSES
         :: R.addresses = NEW_ADDRESSES
#endif
         fi;
#endif
         if
         :: d_step { start(r, n, left, EPOCH(r - 1) + 1); n = 0; left = 0 }
         :: d_step { r > 1 -> start(r, n, left, EPOCH(r - 1)); n = 0; left = 0 }
         fi
     }

  :: d_step { /* it is elected, and its own copy becomes the log that counts */
       R.state == ELECTING && VOTERS_OF(R.list) && HAS_PROMISES && EPOCH(OWN.last_run) < EPOCH(r) ->
         find_best(r);
         R.promises = 0;
         for (i : 0 .. MEMBERS - 1) { R.tail_run[i] = NOBODY; R.tail_length[i] = 0 }
         i = 0;
         R.first = length + 1;
         R.written = length;
         OWN.length = 0; OWN.last_run = NOBODY; OWN.list = R.list;
         R.state = WRITING;
         check_runs();
#if defined(CHANGES) && !defined(OUT_FIRST_LIST)    /* the first list of an epoch is the one before, with this epoch */
         change(r, VOTERS_OF(R.list));
#endif
         if
         :: r == RUNS -> stop(r)                                /* nobody comes who could lose what it writes */
#ifndef OUT_OWN_EPOCH
         :: length == RECORDS -> stop(r)                        /* within the bounds there is no LSN left for it */
#endif
         :: else
         fi;
         best = NOBODY; length = 0
     }

  :: d_step { /* it writes a record */
       R.state == WRITING && R.written < RECORDS ->
         R.log[R.written] = r;
         R.written++
     }

#ifdef CHANGES
  :: d_step { /* the list that was stored counts */
       R.state == WRITING && R.pending && IS_STORED ->
         R.list = R.pending;
         R.pending = 0; R.stored = 0;
         OWN.list = R.list;
         commit(r)
     }
#endif
  od
}

init {
  byte m, r;
  atomic {
    for (m : 0 .. MEMBERS - 1) {
      member[m].list = (HAS(VOTERS, m) -> LIST(0, 1, VOTERS) : 0);
#if defined(OUT_SYNC) || defined(OUT_DURABLE) || defined(RESTARTS) || WIPED_MAX
      run Disk(m)
#endif
    }
    for (r : 1 .. RUNS) {
      run Proposer(r);
      for (m : 0 .. MEMBERS - 1) { run Link(m, r) }
    }
#ifdef NEVER_COUNTED
    member[NEVER_COUNTED].list = LIST(0, 2, VOTERS | BIT(NEVER_COUNTED));
#endif
    for (r : 0 .. NODES - 1) { node[r].list = LIST(0, 1, VOTERS) }
    m = 0; r = 0
  }
}
