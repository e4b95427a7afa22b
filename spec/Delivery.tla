------------------------------- MODULE Delivery -------------------------------
(***************************************************************************)
(* Who may redeliver, acknowledge or process a message, and what a reader  *)
(* of the markers topic may conclude.  R1 to R26 are in docs/rules.md; of  *)
(* R27 to R35, some for transactions that kmqpy does not have, comments    *)
(* state those modelled here.  spec/README.md: how to run the model.       *)
(*                                                                         *)
(* There is one log per markers partition.  A record stands in it alone    *)
(* (tx = 0) or is part of a Kafka transaction, which is open, committed or *)
(* aborted.  The last stable offset of a log is the position of its first  *)
(* open record.  Any open transaction may be aborted at any time: by its   *)
(* time-out, a kill, or the take-over of another tracker.  Its owner does  *)
(* not know, goes on, and the broker refuses what it writes.               *)
(*                                                                         *)
(* There is no clock: the lease of any message in flight may be over at    *)
(* any time.  So extend and nack, which move the end of a lease, and the   *)
(* tracker's ticks need no actions of their own.  Nor does death: who does *)
(* nothing more may be dead.  So may a client that takes a copy and gives  *)
(* it back, as one does that finds a late extend.                          *)
(*                                                                         *)
(* The request that ends a transaction may be sent twice, and the first    *)
(* one come late.  Then it ends the transaction of the same producer and   *)
(* epoch that is open at that time, whatever that has written.             *)
(*                                                                         *)
(* Messages 1..Originals exist at the start.  A copy that a tracker makes  *)
(* gets the next number.                                                   *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    \* --- bounds ---
    Originals,        \* how many messages are sent
    PartitionOf,      \* the partition of each original, a sequence; a copy is in its original's
    MaxMessages,      \* originals and copies
    MaxTransactions,
    MaxAcks,          \* plain acknowledgements, outside of transactions
    MaxTakeovers,     \* how often a tracker starts anew at its stored offset
    MaxDeletions,     \* how often retention deletes the oldest markers
    MaxDeadLetters,
    MaxLate,          \* how many requests that end a tracker's transaction may come once more
    Clients,          \* they share receipts: each may end what another took
    Owner,            \* the client that has the partitions now
    FetchedEarlier,   \* originals that the other clients fetched before they lost the partition
    \* --- the rules; each FALSE (or another value) is a negative control ---
    TransactionsAbort,    \* open transactions may be aborted at any time
    TrackerClaims,        \* R27: a tracker's transaction begins with a claim of all that is planned
    TrackerWaits,         \* R27: it goes on once all before its claim is decided
    TrackerNamesDropped,  \* it lists claimed messages that it does not redeliver after all
    CopiesFirst,          \* not a rule: it may write the copies before that, and then give the transaction up
    Fencing,              \* R36: after an end that may come once more it opens a new epoch of its producer
    TornAreMended,        \* R37: of a claim that somebody else made visible, it ends what was copied
    LateTakesEnd,         \* R30: a message that is in flight again after its end is ended without a copy
    EndsAreStored,        \* R30: a successor knows which messages were ended before its stored offset
    TakerLooks,           \* R32: who takes a copy looks for acknowledgements of it and of its ancestors
    TakerLooksFrom,       \* R32: from the "plan" of the first copy, which later copies keep; from the plan of
                          \* its own copy, "last plan" (a control); or from its own "take" (a control)
    TrackerLooks,         \* R32: a tracker looks for them, too, before a copy becomes a dead letter
    AncestorsFrom,        \* R33: what is a copy of what, it knows from the "log", or from "headers" (a control)
    Forwarded,            \* originals that somebody sent with the headers of a copy of message 1
    ClientReads,          \* "tail": R31, all up to its own end of a message counts, decided or not;
                          \* "ends": the same without claims; "nothing": it does not look
    ClientHeedsAncestors, \* an acknowledgement of an ancestor counts, too
    ClientChecksRetention \* a client's transaction is refused if markers since its take are deleted

VARIABLES
    log,        \* partition -> sequence of records
    txs,        \* sequence of transactions
    client,     \* client -> its state
    received,   \* client -> the messages that it was handed out: it has their receipts
    looking,    \* client -> copies that it has taken and not handed out, each with the position of its take
    tracker,    \* partition -> the state of the tracker that owns it
    parent,     \* copy -> the message it is a copy of; 0: an original, or not there yet
    planned,    \* copy -> the positions before which its plan, and that of the first copy, knew the log
    made,       \* how many messages there are
    acks,       \* how many plain acknowledgements there were
    start,      \* partition -> the position from which its tracker has read the log
    lowest,     \* partition -> the lowest position that retention has left
    takeovers,  \* how many take-overs and deletions there were
    deletions,
    lateEnds,   \* partition -> how many ends of transactions may come once more, in the epoch of its tracker
    repeated,   \* how many there were
    handedOut   \* copies that were handed out, each with the position of its take

vars == <<log, txs, client, received, looking, tracker, parent, planned, made, acks, start, lowest, takeovers,
          deletions, lateEnds, repeated, handedOut>>

Partitions == {PartitionOf[m] : m \in 1..Originals}
Messages == 1..MaxMessages
Existing == 1..made
Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Max(x, y) == IF x > y THEN x ELSE y

RECURSIVE Ancestors(_), KnownAncestors(_), Original(_)
Ancestors(m) == IF parent[m] = 0 THEN {} ELSE {parent[m]} \cup Ancestors(parent[m])
Original(m) == IF parent[m] = 0 THEN m ELSE Original(parent[m])
Partition(m) == PartitionOf[Original(m)]

(* R33: the end of its original says of a copy that it is one; nothing does as long as that end is missing. *)
IsNamed(m) == MaxLate = 0 \/ \E i \in DOMAIN log[Partition(m)] : log[Partition(m)][i].copy = m
KnownAncestors(m) ==
    IF parent[m] = 0 \/ ~IsNamed(m) THEN {} ELSE {parent[m]} \cup KnownAncestors(parent[m])

(***************************************************************************)
(* Records: a "take" (start marker), an "ack" (end marker of a client whose  *)
(* user acknowledged the message), an "unseen" (end marker of a client     *)
(* that hands a copy out to nobody), an "end" (end marker inside a         *)
(* transaction; `copy` is the copy that a tracker made, else 0), a "claim", *)
(* or "dropped".                                                           *)
(***************************************************************************)
Record(kind, tx, ms) == [kind |-> kind, tx |-> tx, ms |-> ms, copy |-> 0]
Append1(p, record) == log' = [log EXCEPT ![p] = Append(@, record)]
Positions(p) == DOMAIN log[p]
NextPosition(p) == Len(log[p]) + 1

IsOpen(r) == r.tx # 0 /\ txs[r.tx].state = "open"
IsCommitted(r) == r.tx = 0 \/ txs[r.tx].state = "committed"
IsEndOf(r, m) == r.kind \in {"end", "ack", "unseen"} /\ m \in r.ms
SpeaksOf(r, m) == r.kind \in {"take", "end", "ack", "unseen"} /\ m \in r.ms
LastStable(p) == LET open == {i \in Positions(p) : IsOpen(log[p][i])}
                 IN IF open = {} THEN NextPosition(p) ELSE Min(open)
FirstOf(p, tx) == LET own == {i \in Positions(p) : log[p][i].tx = tx}
                  IN IF own = {} THEN 0 ELSE Min(own)

IsVisible(m) == m <= Originals \/ \E t \in DOMAIN txs : txs[t].state = "committed" /\ m \in txs[t].copies

(***************************************************************************)
(* What a reader of positions from..to-1 knows.                            *)
(***************************************************************************)
IsAcked(p, from, to, ms) == \E i \in Positions(p) :
    from <= i /\ i < to /\ log[p][i].kind \in {"ack", "unseen"} /\ log[p][i].ms \cap ms # {}

HasTake(p, from, to, m) == \E i \in Positions(p) :
    from <= i /\ i < to /\ log[p][i].kind = "take" /\ m \in log[p][i].ms

InFlight(p, from, to) == {m \in Existing : Partition(m) = p /\ \E i \in Positions(p) :
    /\ from <= i /\ i < to /\ log[p][i].kind = "take" /\ m \in log[p][i].ms
    /\ \A j \in Positions(p) : (i < j /\ j < to /\ IsCommitted(log[p][j])) => ~IsEndOf(log[p][j], m)}

(* R30: a message that was in flight and was ended; one that nobody has is not finished by an end. *)
IsFinished(p, from, to, m) == \E i \in Positions(p) :
    from <= i /\ i < to /\ IsCommitted(log[p][i]) /\ IsEndOf(log[p][i], m) /\ HasTake(p, 1, i, m)

(***************************************************************************)
(* The stored offset of a partition: the position of the oldest record     *)
(* that a successor has to read.  What it has to know of earlier ones, the *)
(* messages ended there, is stored with it.  A torn claim has to be read,  *)
(* too: one that is visible, with copies whose originals are neither ended *)
(* by the same transaction nor afterwards.                                 *)
(***************************************************************************)
IsTorn(p, i, m) ==
    /\ log[p][i].kind = "claim" /\ IsCommitted(log[p][i]) /\ m \in txs[log[p][i].tx].copied
    /\ ~\E j \in Positions(p) : i < j /\ log[p][j].kind = "end" /\ log[p][j].tx \in {0, log[p][i].tx} /\ m \in log[p][j].ms
Torn(p) == IF MaxLate = 0 \/ ~TornAreMended THEN {} ELSE
    {torn \in (start[p]..LastStable(p) - 1) \X Existing : IsTorn(p, torn[1], torn[2])}

StoredOffset(p) == Min({LastStable(p)} \cup {torn[1] : torn \in Torn(p)} \cup {i \in Positions(p) :
    /\ start[p] <= i /\ i < LastStable(p) /\ log[p][i].kind = "take"
    /\ log[p][i].ms \cap InFlight(p, start[p], LastStable(p)) # {}})

-------------------------------------------------------------------------------
NoTransaction == [step |-> "idle", tx |-> 0, ms |-> {}, left |-> {}]
NoPlan == [step |-> "idle", tx |-> 0, ms |-> {}, left |-> {}, late |-> {}, at |-> 0]
NewTransaction ==
    Append(txs, [state |-> "open", processed |-> {}, copied |-> {}, copies |-> {}, dead |-> {}])
TakenByAll == IF FetchedEarlier = {} THEN 1..Originals \ Forwarded ELSE {}

Init ==
    /\ log = [p \in Partitions |-> IF TakenByAll = {} THEN <<>> ELSE
                 <<Record("take", 0, {m \in TakenByAll : PartitionOf[m] = p})>>]
    /\ txs = <<>>
    /\ client = [c \in Clients |-> NoTransaction]
    /\ received = [c \in Clients |-> TakenByAll]
    /\ looking = [c \in Clients |-> {}]
    /\ tracker = [p \in Partitions |-> NoPlan]
    /\ parent = [m \in Messages |-> 0]
    /\ planned = [m \in Messages |-> 0]
    /\ made = Originals
    /\ acks = 0
    /\ start = [p \in Partitions |-> 1]
    /\ lowest = [p \in Partitions |-> 1]
    /\ takeovers = 0 /\ deletions = 0
    /\ lateEnds = [p \in Partitions |-> 0] /\ repeated = 0
    /\ handedOut = {}

unchangedEnds == UNCHANGED <<lateEnds, repeated>>
unchangedHistory == UNCHANGED <<start, lowest, takeovers, deletions>> /\ unchangedEnds

(***************************************************************************)
(* A tracker: plan, claim, wait for all before the claim, drop what was    *)
(* spoken of meanwhile, copy, end, commit.                                 *)
(***************************************************************************)
MayBegin(p) == tracker[p].step = "idle" /\ (Fencing => lateEnds[p] = 0)

TrackerPlans(p) ==
    /\ MayBegin(p) /\ Torn(p) = {} /\ Len(txs) < MaxTransactions
    /\ \E due \in SUBSET InFlight(p, start[p], LastStable(p)) :
         LET knownFrom == IF EndsAreStored THEN 1 ELSE start[p]
             late == {m \in due : LateTakesEnd /\ IsFinished(p, knownFrom, LastStable(p), m)}
         IN /\ due # {} /\ made + Cardinality(due \ late) <= MaxMessages
            /\ tracker' = [tracker EXCEPT ![p] = [NoPlan EXCEPT !.step = "planned", !.ms = due, !.late = late,
                                                                !.at = LastStable(p)]]
    /\ UNCHANGED <<log, txs, client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

TrackerBegins(p) ==
    /\ tracker[p].step = "planned" /\ Len(txs) < MaxTransactions
    /\ txs' = NewTransaction
    /\ IF TrackerClaims THEN Append1(p, Record("claim", Len(txs'), tracker[p].ms)) ELSE UNCHANGED log
    /\ tracker' = [tracker EXCEPT ![p].step = IF TrackerClaims THEN "claimed" ELSE "copying",
                                  ![p].tx = Len(txs'), ![p].left = tracker[p].ms]
    /\ UNCHANGED <<client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

TrackerDecides(p) ==  \* it reads what stands between its plan and its claim
    LET mine == FirstOf(p, tracker[p].tx)
        dropped == {m \in tracker[p].ms : \E i \in Positions(p) :
            tracker[p].at <= i /\ i < mine /\ IsCommitted(log[p][i]) /\ SpeaksOf(log[p][i], m)}
    IN /\ tracker[p].step = "claimed" /\ txs[tracker[p].tx].state = "open"
       /\ TrackerWaits => LastStable(p) = mine
       /\ tracker' = [tracker EXCEPT ![p].step = "copying", ![p].left = @ \ dropped]
       /\ IF dropped # {} /\ TrackerNamesDropped
          THEN Append1(p, Record("dropped", tracker[p].tx, dropped)) ELSE UNCHANGED log
       /\ UNCHANGED <<txs, client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

PlannedFrom(p, m) == IF parent[m] = 0 \/ TakerLooksFrom = "last plan" THEN tracker[p].at ELSE planned[m]

TrackerCopies(p) ==  \* a copy and the end of its original; messages one by one
    /\ tracker[p].step = "copying" /\ txs[tracker[p].tx].state = "open" /\ made < MaxMessages
    /\ \E m \in tracker[p].left \ tracker[p].late :
         /\ Append1(p, [Record("end", tracker[p].tx, {m}) EXCEPT !.copy = made + 1])
         /\ made' = made + 1
         /\ parent' = [parent EXCEPT ![made + 1] = m]
         /\ planned' = [planned EXCEPT ![made + 1] = PlannedFrom(p, m)]
         /\ txs' = [txs EXCEPT ![tracker[p].tx].copies = @ \cup {made + 1}, ![tracker[p].tx].copied = @ \cup {m}]
         /\ tracker' = [tracker EXCEPT ![p].left = @ \ {m}]
    /\ UNCHANGED <<client, received, looking, acks, handedOut>> /\ unchangedHistory

TrackerEndsLate(p) ==  \* R30: what was taken after its end is ended again, without a copy
    /\ tracker[p].step = "copying" /\ txs[tracker[p].tx].state = "open"
    /\ \E m \in tracker[p].left \cap tracker[p].late :
         /\ Append1(p, Record("end", tracker[p].tx, {m}))
         /\ tracker' = [tracker EXCEPT ![p].left = @ \ {m}]
    /\ UNCHANGED <<txs, client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

(* R32: a copy becomes no dead letter if it, or an ancestor, was acknowledged before the claim; it is only ended. *)
(* The tracker reads the log once, from its claim on: what is acknowledged behind the claim may count or not.     *)
AckedLate(p, m, to) == parent[m] # 0 /\ IsAcked(p, Max(planned[m], lowest[p]), to, {m} \cup KnownAncestors(m))
DeadLetters == UNION {txs[t].dead : t \in DOMAIN txs}

TrackerDeadLetters(p) ==
    /\ tracker[p].step = "copying" /\ txs[tracker[p].tx].state = "open"
    /\ Cardinality(DeadLetters) < MaxDeadLetters
    /\ \E m \in tracker[p].left \ tracker[p].late :
         /\ TrackerLooks => ~AckedLate(p, m, FirstOf(p, tracker[p].tx))
         /\ Append1(p, Record("end", tracker[p].tx, {m}))
         /\ txs' = [txs EXCEPT ![tracker[p].tx].dead = @ \cup {m}, ![tracker[p].tx].copied = @ \cup {m}]
         /\ tracker' = [tracker EXCEPT ![p].left = @ \ {m}]
    /\ UNCHANGED <<client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

TrackerSpares(p) ==
    /\ tracker[p].step = "copying" /\ txs[tracker[p].tx].state = "open"
    /\ TrackerLooks /\ Cardinality(DeadLetters) < MaxDeadLetters
    /\ \E m \in tracker[p].left \ tracker[p].late :
         /\ AckedLate(p, m, NextPosition(p))
         /\ Append1(p, Record("end", tracker[p].tx, {m}))
         /\ tracker' = [tracker EXCEPT ![p].left = @ \ {m}]
    /\ UNCHANGED <<txs, client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

(* A late request to abort is none of its own: transactions may be aborted at any time. *)
EndMayComeOnceMore(p) ==
    \/ unchangedEnds
    \/ repeated < MaxLate /\ repeated' = repeated + 1 /\ lateEnds' = [lateEnds EXCEPT ![p] = @ + 1]

TrackerCommits(p) ==
    /\ tracker[p].step = "copying" /\ tracker[p].left = {} /\ txs[tracker[p].tx].state = "open"
    /\ txs' = [txs EXCEPT ![tracker[p].tx].state = "committed"]
    /\ tracker' = [tracker EXCEPT ![p] = NoPlan]
    /\ EndMayComeOnceMore(p)
    /\ UNCHANGED <<log, client, received, looking, parent, planned, made, acks, start, lowest, takeovers, deletions, handedOut>>

(* Its transaction was ended, not by itself.  Who is refused opens a new producer, too; that its late ends stay is more. *)
TrackerIsRefused(p) ==
    /\ tracker[p].tx # 0 /\ txs[tracker[p].tx].state # "open"
    /\ tracker' = [tracker EXCEPT ![p] = NoPlan]
    /\ UNCHANGED <<log, txs, client, received, looking, parent, planned, made, acks, handedOut>> /\ unchangedHistory

(***************************************************************************)
(* The request comes late.  TrackerCopies writes a copy and its end in one *)
(* step, since nobody sees the copy before the commit.  Now it may have    *)
(* written some whose ends are not written yet: they become visible        *)
(* without them.  If it writes the copies first, this is so before it has  *)
(* decided, too.  What it writes until it is refused is a transaction of   *)
(* its own for the broker, which a second request may end.                 *)
(***************************************************************************)
LateEndTxn(p) ==
    LET t == tracker[p].tx
        decided == tracker[p].step = "copying"
        rank(m, ms) == Cardinality({x \in ms : x <= m})
        candidates == IF decided \/ CopiesFirst THEN tracker[p].left \ (tracker[p].late \cup txs[t].copied) ELSE {}
    IN /\ lateEnds[p] > 0 /\ t # 0 /\ txs[t].state # "aborted"
       /\ lateEnds' = [lateEnds EXCEPT ![p] = @ - 1]
       /\ \E copied \in SUBSET candidates :
          \E dead \in SUBSET {m \in copied : /\ decided \/ parent[m] = 0
                                            /\ TrackerLooks => ~AckedLate(p, m, FirstOf(p, t))} :
            LET live == copied \ dead
                new == made + 1..made + Cardinality(live)
                source(n) == CHOOSE m \in live : made + rank(m, live) = n
            IN /\ made + Cardinality(live) <= MaxMessages
               /\ Cardinality(DeadLetters \cup dead) <= MaxDeadLetters
               /\ made' = made + Cardinality(live)
               /\ parent' = [n \in Messages |-> IF n \in new THEN source(n) ELSE parent[n]]
               /\ planned' = [n \in Messages |-> IF n \in new THEN PlannedFrom(p, source(n)) ELSE planned[n]]
               /\ txs' = [txs EXCEPT ![t].state = "committed", ![t].copies = @ \cup new,
                                      ![t].copied = @ \cup copied, ![t].dead = @ \cup dead]
    /\ UNCHANGED <<log, client, received, looking, tracker, acks, start, lowest, takeovers, deletions, repeated, handedOut>>

(* R36: it takes the partition over again, and what may come late is of an epoch that is over. *)
TrackerFences(p) ==
    /\ Fencing /\ tracker[p].step = "idle" /\ lateEnds[p] > 0
    /\ lateEnds' = [lateEnds EXCEPT ![p] = 0]
    /\ UNCHANGED <<log, txs, client, received, looking, tracker, parent, planned, made, acks, start, lowest, takeovers,
                   deletions, repeated, handedOut>>

(* R37: before it redelivers anything it looks for the copies of torn claims, and writes the ends that name them.  *)
(* Messages without a copy are due again.  A transaction has one end here: another one could be torn itself.       *)
TrackerMends(p) ==
    /\ MayBegin(p) /\ Torn(p) # {}
    /\ LET torn == CHOOSE one \in Torn(p) : \A other \in Torn(p) : one[2] <= other[2]
           copies == {n \in txs[log[p][torn[1]].tx].copies : parent[n] = torn[2]}
       IN Append1(p, [Record("end", 0, {torn[2]}) EXCEPT !.copy = IF copies = {} THEN 0 ELSE Min(copies)])
    /\ EndMayComeOnceMore(p)
    /\ UNCHANGED <<txs, client, received, looking, tracker, parent, planned, made, acks, start, lowest, takeovers,
                   deletions, handedOut>>

(* Another tracker takes the partition over: it fences the former one and reads from the stored offset. *)
Takeover(p) ==
    /\ takeovers < MaxTakeovers /\ takeovers' = takeovers + 1
    /\ txs' = IF tracker[p].tx = 0 \/ txs[tracker[p].tx].state # "open" THEN txs
              ELSE [txs EXCEPT ![tracker[p].tx].state = "aborted"]
    /\ tracker' = [tracker EXCEPT ![p] = NoPlan]
    /\ start' = [start EXCEPT ![p] = StoredOffset(p)]
    /\ lateEnds' = [lateEnds EXCEPT ![p] = 0]
    /\ UNCHANGED <<log, client, received, looking, parent, planned, made, acks, lowest, deletions, repeated, handedOut>>

(* Retention deletes markers that the tracker does not need any more (R9 keeps it from deleting others). *)
Retention(p) ==
    /\ deletions < MaxDeletions /\ deletions' = deletions + 1
    /\ StoredOffset(p) > lowest[p]
    /\ lowest' = [lowest EXCEPT ![p] = StoredOffset(p)]
    /\ start' = [start EXCEPT ![p] = StoredOffset(p)]
    /\ UNCHANGED <<log, txs, client, received, looking, tracker, parent, planned, made, acks, takeovers, handedOut>>
    /\ unchangedEnds

(***************************************************************************)
(* A client's transaction (exactly once; for later): an end for each       *)
(* message, a look at the log, the outputs, commit.  Its take is at or     *)
(* after position 1, so it reads from there.                               *)
(***************************************************************************)
EndPosition(p, tx, m) == CHOOSE i \in Positions(p) : log[p][i].tx = tx /\ m \in log[p][i].ms

ClaimStands(p, i, m, to) ==
    /\ log[p][i].kind = "claim" /\ m \in log[p][i].ms
    /\ ~\E j \in Positions(p) : i < j /\ j < to /\ log[p][j].kind = "dropped" /\ log[p][j].tx = log[p][i].tx
                                /\ m \in log[p][j].ms

HasConflict(p, tx, ms) == \E m \in ms : LET mine == EndPosition(p, tx, m) IN \E i \in Positions(p) :
    /\ lowest[p] <= i /\ i < mine /\ log[p][i].tx # tx
    /\ \/ IsEndOf(log[p][i], m)
       \/ ClientReads = "tail" /\ ClaimStands(p, i, m, mine)
       \/ ClientHeedsAncestors /\ IsAcked(p, i, i + 1, KnownAncestors(m))

ToIdle(c) == client' = [client EXCEPT ![c] = NoTransaction]

ClientBegins(c) ==
    /\ client[c].step = "idle" /\ Len(txs) < MaxTransactions
    /\ \E ms \in SUBSET received[c] :
         /\ ms # {}
         /\ client' = [client EXCEPT ![c].step = "ending", ![c].tx = Len(txs) + 1, ![c].ms = ms, ![c].left = ms]
    /\ txs' = NewTransaction
    /\ UNCHANGED <<log, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

ClientEnds(c) ==
    /\ client[c].step = "ending" /\ txs[client[c].tx].state = "open"
    /\ \E m \in client[c].left :
         /\ Append1(Partition(m), Record("end", client[c].tx, {m}))
         /\ client' = [client EXCEPT ![c].left = @ \ {m},
                                     ![c].step = IF client[c].left = {m} THEN "looking" ELSE "ending"]
    /\ UNCHANGED <<txs, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

ClientLooks(c) ==
    LET mine(p) == {m \in client[c].ms : Partition(m) = p}
        refused == \E p \in Partitions : mine(p) # {} /\
            \/ ClientChecksRetention /\ lowest[p] > 1
            \/ ClientReads # "nothing" /\ HasConflict(p, client[c].tx, mine(p))
    IN /\ client[c].step = "looking" /\ txs[client[c].tx].state = "open"
       /\ IF refused
          THEN ToIdle(c) /\ txs' = [txs EXCEPT ![client[c].tx].state = "aborted"]
          ELSE client' = [client EXCEPT ![c].step = "committing"] /\ UNCHANGED txs
       /\ UNCHANGED <<log, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

ClientCommits(c) ==
    /\ client[c].step = "committing" /\ txs[client[c].tx].state = "open"
    /\ txs' = [txs EXCEPT ![client[c].tx].state = "committed", ![client[c].tx].processed = client[c].ms]
    /\ ToIdle(c)
    /\ UNCHANGED <<log, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

ClientIsRefused(c) ==
    /\ client[c].tx # 0 /\ txs[client[c].tx].state = "aborted"
    /\ ToIdle(c)
    /\ UNCHANGED <<log, txs, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

(***************************************************************************)
(* Plain acknowledgements and takes.  Who takes a copy looks, once its take *)
(* is in the log, whether the copy or an ancestor was acknowledged, and     *)
(* then hands it out or ends it unseen (R32, R33).  It reads uncommitted:   *)
(* that the copy can be seen proves that its own transaction is done.       *)
(***************************************************************************)
Acknowledges(c) ==
    /\ acks < MaxAcks /\ acks' = acks + 1
    /\ \E m \in received[c] : Append1(Partition(m), Record("ack", 0, {m}))
    /\ UNCHANGED <<txs, client, received, looking, tracker, parent, planned, made, handedOut>> /\ unchangedHistory

SeemsACopy(m) == parent[m] # 0 \/ (AncestorsFrom = "headers" /\ m \in Forwarded)
SeemingAncestors(m) == KnownAncestors(m) \cup (IF AncestorsFrom = "headers" /\ m \in Forwarded THEN {1} ELSE {})
Has(c, m) == m \in received[c] \/ \E taken \in looking[c] : taken[1] = m

HandsOut(c, m, position) ==
    /\ received' = [received EXCEPT ![c] = @ \cup {m}]
    /\ handedOut' = IF parent[m] = 0 THEN handedOut ELSE handedOut \cup {<<m, position>>}

Takes(c) ==
    \E m \in Existing : LET p == Partition(m) IN
        /\ IsVisible(m) /\ ~Has(c, m)
        /\ \/ ~HasTake(p, 1, NextPosition(p), m) /\ (m <= Originals => c = Owner)  \* it has read the takes (R10)
           \/ c # Owner /\ m \in FetchedEarlier         \* it fetched the message long ago and was paused
        /\ Append1(p, Record("take", 0, {m}))
        /\ IF TakerLooks /\ SeemsACopy(m)
           THEN looking' = [looking EXCEPT ![c] = @ \cup {<<m, NextPosition(p)>>}] /\ UNCHANGED <<received, handedOut>>
           ELSE HandsOut(c, m, NextPosition(p)) /\ UNCHANGED looking
        /\ UNCHANGED <<txs, client, tracker, parent, planned, made, acks>> /\ unchangedHistory

Looks(c) ==
    \E taken \in looking[c] :
        LET m == taken[1]
            p == Partition(m)
            from == IF TakerLooksFrom = "take" THEN taken[2] ELSE planned[m]
            ended == IsAcked(p, Max(from, lowest[p]), NextPosition(p), {m} \cup SeemingAncestors(m))
        IN /\ looking' = [looking EXCEPT ![c] = @ \ {taken}]
           /\ IF ended
              THEN Append1(p, Record("unseen", 0, {m})) /\ UNCHANGED <<received, handedOut>>
              ELSE HandsOut(c, m, taken[2]) /\ UNCHANGED log
           /\ UNCHANGED <<txs, client, tracker, parent, planned, made, acks>> /\ unchangedHistory

SomeTransactionAborts ==
    /\ TransactionsAbort
    /\ \E t \in DOMAIN txs : txs[t].state = "open" /\ txs' = [txs EXCEPT ![t].state = "aborted"]
    /\ UNCHANGED <<log, client, received, looking, tracker, parent, planned, made, acks, handedOut>> /\ unchangedHistory

Next ==
    \/ SomeTransactionAborts
    \/ \E p \in Partitions :
         \/ TrackerPlans(p) \/ TrackerBegins(p) \/ TrackerDecides(p) \/ TrackerCopies(p) \/ TrackerEndsLate(p)
         \/ TrackerDeadLetters(p) \/ TrackerSpares(p) \/ TrackerCommits(p) \/ TrackerIsRefused(p)
         \/ LateEndTxn(p) \/ TrackerFences(p) \/ TrackerMends(p) \/ Takeover(p) \/ Retention(p)
    \/ \E c \in Clients :
         \/ ClientBegins(c) \/ ClientEnds(c) \/ ClientLooks(c) \/ ClientCommits(c) \/ ClientIsRefused(c)
         \/ Acknowledges(c) \/ Takes(c) \/ Looks(c)

Spec == Init /\ [][Next]_vars

-------------------------------------------------------------------------------
(***************************************************************************)
(* Invariants                                                              *)
(***************************************************************************)
Committed == {t \in DOMAIN txs : txs[t].state = "committed"}
(* Of a message and all of its copies, one at most is processed by a committed transaction. *)
ProcessedOnce == \A o \in 1..Originals :
    Cardinality({t \in Committed : \E m \in txs[t].processed : Original(m) = o}) <= 1

(* A message is processed or redelivered by one committed transaction at most. *)
OneFate == \A m \in Existing :
    Cardinality({t \in Committed : m \in txs[t].processed \cup txs[t].copied}) <= 1

(* R27, R28: no committed transaction redelivers what was acknowledged before its first record, and none processes what *)
(* was, or is a copy of what was.  A tracker does not look for acknowledgements of ancestors, but before a dead letter: who takes the copy does.  *)
AckHolds == \A t \in Committed :
    /\ \A m \in txs[t].copied : ~IsAcked(Partition(m), 1, FirstOf(Partition(m), t), {m})
    /\ \A m \in txs[t].processed : ~IsAcked(Partition(m), 1, FirstOf(Partition(m), t), {m} \cup Ancestors(m))

(* Each original, or a copy of it, is processed, acknowledged, a dead letter, or not ended yet. *)
NothingLost == \A o \in 1..Originals : \E m \in Existing :
    LET p == Partition(m) IN
    /\ Original(m) = o /\ IsVisible(m)
    /\ \/ \E t \in Committed : m \in txs[t].processed \cup txs[t].dead
       \/ \E i \in Positions(p) : log[p][i].kind = "ack" /\ m \in log[p][i].ms
       \/ ~\E i \in Positions(p) : IsCommitted(log[p][i]) /\ IsEndOf(log[p][i], m)

(* R32: no copy is handed out whose take stands after an acknowledgement of an ancestor, unless retention deleted that. *)
NoStaleHandOut == \A h \in handedOut : LET p == Partition(h[1]) IN ~IsAcked(p, lowest[p], h[2], Ancestors(h[1]))

(* R32: nor does a copy become a dead letter in a transaction whose claim stands after such an acknowledgement. *)
NoStaleDeadLetter == \A t \in Committed : \A m \in txs[t].dead :
    LET p == Partition(m) IN ~IsAcked(p, lowest[p], FirstOf(p, t), Ancestors(m))
===============================================================================
