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
(* tracker's ticks need no actions of their own.                           *)
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
    Clients,          \* they share receipts: each may end what another took
    Owner,            \* the client whose generation of the consumer group is the newest
    FetchedEarlier,   \* originals that the other clients fetched before they lost the partition
    \* --- the rules; each FALSE (or another value) is a negative control ---
    TransactionsAbort,    \* open transactions may be aborted at any time
    TrackerClaims,        \* R27: a tracker's transaction begins with a claim of all that is planned
    TrackerWaits,         \* R27: it goes on once all before its claim is decided
    TrackerNamesDropped,  \* it lists claimed messages that it does not redeliver after all
    ClientReads,          \* "tail": R31, all up to its own end of a message counts, decided or not;
                          \* "ends": the same without claims; "nothing": it does not look
    ClientChecksRetention,\* a client's transaction is refused if markers since its take are deleted
    TakesAreFenced,       \* R30: readers ignore takes of a generation below the highest seen
    AliasesCount,         \* an acknowledgement of an ancestor ends the newest copy
    AliasHoldsOffset,     \* R34: "in flight": the record that names a copy holds the stored offset
                          \* back as long as the copy is pending or in flight; "pending": as long as it
                          \* is pending; "no": not at all
    AliasFromClaim,       \* what holds the offset back is the claim of the transaction that made the copy;
                          \* FALSE: its end, which names the copy (a control)
    FollowFrom            \* R32: who takes a copy looks for acknowledgements of its ancestors from the
                          \* "claim" that the copy names, or from its own "take" (a control)

VARIABLES
    log,        \* partition -> sequence of records
    txs,        \* sequence of transactions
    client,     \* client -> its state
    received,   \* client -> the messages whose receipts it has
    tracker,    \* partition -> the state of the tracker that owns it
    parent,     \* copy -> the message it is a copy of; 0: an original, or not there yet
    made,       \* how many messages there are
    acks,       \* how many plain acknowledgements there were
    start,      \* partition -> the position from which its tracker has read the log
    lowest,     \* partition -> the lowest position that retention has left
    takeovers,  \* how many take-overs and deletions there were
    deletions,
    handedOut   \* copies that were handed out, each with the position of its take

vars == <<log, txs, client, received, tracker, parent, made, acks, start, lowest, takeovers, deletions, handedOut>>

Partitions == {PartitionOf[m] : m \in 1..Originals}
Messages == 1..MaxMessages
Existing == 1..made
Min(S) == CHOOSE x \in S : \A y \in S : x <= y

RECURSIVE Ancestors(_), Original(_)
Ancestors(m) == IF parent[m] = 0 THEN {} ELSE {parent[m]} \cup Ancestors(parent[m])
Original(m) == IF parent[m] = 0 THEN m ELSE Original(parent[m])
Partition(m) == PartitionOf[Original(m)]

(***************************************************************************)
(* Records: a "take" (start marker), an "ack" (plain end marker of a       *)
(* client), an "end" (end marker inside a transaction; `copy` is the copy  *)
(* that a tracker made, else 0), a "claim", or "dropped".                  *)
(***************************************************************************)
Record(kind, tx, ms) == [kind |-> kind, tx |-> tx, ms |-> ms, copy |-> 0, generation |-> 0]
Append1(p, record) == log' = [log EXCEPT ![p] = Append(@, record)]
Positions(p) == DOMAIN log[p]
NextPosition(p) == Len(log[p]) + 1

IsOpen(r) == r.tx # 0 /\ txs[r.tx].state = "open"
IsCommitted(r) == r.tx = 0 \/ txs[r.tx].state = "committed"
IsEndOf(r, m) == r.kind \in {"end", "ack"} /\ m \in r.ms
LastStable(p) == LET open == {i \in Positions(p) : IsOpen(log[p][i])}
                 IN IF open = {} THEN NextPosition(p) ELSE Min(open)
FirstOf(p, tx) == LET own == {i \in Positions(p) : log[p][i].tx = tx}
                  IN IF own = {} THEN 0 ELSE Min(own)

IsVisible(m) == m <= Originals \/ \E t \in DOMAIN txs : txs[t].state = "committed" /\ m \in txs[t].copies

(* A take counts unless a take of a newer generation stands before it. *)
TakeCounts(p, i) == ~TakesAreFenced \/ ~\E j \in Positions(p) :
    j < i /\ log[p][j].kind = "take" /\ log[p][j].generation > log[p][i].generation

(***************************************************************************)
(* What a reader of positions from..to-1 knows.                            *)
(***************************************************************************)
NamesCopy(p, from, to, c) == {i \in Positions(p) :
    from <= i /\ i < to /\ log[p][i].copy = c /\ IsCommitted(log[p][i])}

RECURSIVE KnownAncestors(_, _, _, _)
KnownAncestors(p, from, to, m) ==
    IF parent[m] = 0 \/ NamesCopy(p, from, to, m) = {} THEN {}
    ELSE {parent[m]} \cup KnownAncestors(p, from, to, parent[m])

IsAcked(p, from, to, ms) == \E i \in Positions(p) :
    from <= i /\ i < to /\ log[p][i].kind = "ack" /\ log[p][i].ms \cap ms # {}

HasOpenTake(p, from, to, m) == \E i \in Positions(p) :
    /\ from <= i /\ i < to /\ log[p][i].kind = "take" /\ m \in log[p][i].ms /\ TakeCounts(p, i)
    /\ \A j \in Positions(p) : (i < j /\ j < to /\ IsCommitted(log[p][j])) => ~IsEndOf(log[p][j], m)

InFlight(p, from, to) == {m \in Existing :
    /\ Partition(m) = p
    /\ HasOpenTake(p, from, to, m)
    /\ ~(AliasesCount /\ IsAcked(p, from, to, KnownAncestors(p, from, to, m)))}

(***************************************************************************)
(* The stored offset of a partition: the position of the oldest record     *)
(* that a successor has to read.                                           *)
(***************************************************************************)
HasTake(p, m) == \E i \in Positions(p) : log[p][i].kind = "take" /\ m \in log[p][i].ms
OpenTakes(p) == {i \in Positions(p) : /\ start[p] <= i /\ i < LastStable(p) /\ log[p][i].kind = "take"
                                      /\ \E m \in log[p][i].ms : m \in InFlight(p, start[p], LastStable(p))}

(* The first records (the claims) of the transactions that made a copy and its ancestors: an acknowledgement may *)
(* stand between a claim and the end that names the copy.                                                        *)
RECURSIVE Lineage(_, _)
Lineage(p, m) == {IF AliasFromClaim THEN FirstOf(p, log[p][i].tx) ELSE i : i \in NamesCopy(p, start[p], LastStable(p), m)}
                 \cup (IF parent[m] = 0 THEN {} ELSE Lineage(p, parent[m]))
IsPending(p, c) == ~\E i \in Positions(p) : i < LastStable(p) /\ log[p][i].kind = "take" /\ c \in log[p][i].ms
HeldByAliases(p) == UNION {Lineage(p, m) : m \in {c \in Existing : /\ Partition(c) = p /\ IsVisible(c)
    /\ CASE AliasHoldsOffset = "no" -> FALSE
         [] AliasHoldsOffset = "pending" -> IsPending(p, c)
         [] AliasHoldsOffset = "in flight" -> IsPending(p, c) \/ c \in InFlight(p, start[p], LastStable(p))}}

(* Claims that can be read while an open transaction of somebody else still hides the ends that belong to them. *)
UndecidedClaims(p) == {i \in Positions(p) :
    /\ start[p] <= i /\ i < LastStable(p) /\ log[p][i].kind = "claim" /\ IsCommitted(log[p][i]) /\ AliasFromClaim
    /\ \E j \in Positions(p) : j >= LastStable(p) /\ log[p][j].tx = log[p][i].tx}

StoredOffset(p) == Min(OpenTakes(p) \cup HeldByAliases(p) \cup UndecidedClaims(p) \cup {LastStable(p)})

-------------------------------------------------------------------------------
NoTransaction == [step |-> "idle", tx |-> 0, ms |-> {}, left |-> {}]
NewTransaction == Append(txs, [state |-> "open", processed |-> {}, copied |-> {}, copies |-> {}])
Generation(c) == IF c = Owner THEN 2 ELSE 1
TakenByAll == IF FetchedEarlier = {} THEN 1..Originals ELSE {}

Init ==
    /\ log = [p \in Partitions |-> IF FetchedEarlier # {} THEN <<>> ELSE
                 <<[Record("take", 0, {m \in 1..Originals : PartitionOf[m] = p}) EXCEPT !.generation = 1]>>]
    /\ txs = <<>>
    /\ client = [c \in Clients |-> NoTransaction]
    /\ received = [c \in Clients |-> TakenByAll]
    /\ tracker = [p \in Partitions |-> NoTransaction]
    /\ parent = [m \in Messages |-> 0]
    /\ made = Originals
    /\ acks = 0
    /\ start = [p \in Partitions |-> 1]
    /\ lowest = [p \in Partitions |-> 1]
    /\ takeovers = 0 /\ deletions = 0
    /\ handedOut = {}

unchangedHistory == UNCHANGED <<start, lowest, takeovers, deletions>>

(***************************************************************************)
(* A tracker: plan, claim, wait for all before the claim, drop what ended  *)
(* meanwhile, copy, end, commit.                                           *)
(***************************************************************************)
TrackerPlans(p) ==
    /\ tracker[p].step = "idle" /\ Len(txs) < MaxTransactions
    /\ \E due \in SUBSET InFlight(p, start[p], LastStable(p)) :
         /\ due # {} /\ made + Cardinality(due) <= MaxMessages
         /\ tracker' = [tracker EXCEPT ![p] = [NoTransaction EXCEPT !.step = "planned", !.ms = due]]
    /\ UNCHANGED <<log, txs, client, received, parent, made, acks, handedOut>> /\ unchangedHistory

TrackerBegins(p) ==
    /\ tracker[p].step = "planned" /\ Len(txs) < MaxTransactions
    /\ txs' = NewTransaction
    /\ IF TrackerClaims THEN Append1(p, Record("claim", Len(txs'), tracker[p].ms)) ELSE UNCHANGED log
    /\ tracker' = [tracker EXCEPT ![p].step = IF TrackerClaims THEN "claimed" ELSE "copying",
                                  ![p].tx = Len(txs'), ![p].left = tracker[p].ms]
    /\ UNCHANGED <<client, received, parent, made, acks, handedOut>> /\ unchangedHistory

TrackerDecides(p) ==
    LET mine == FirstOf(p, tracker[p].tx)
        kept == tracker[p].ms \cap InFlight(p, start[p], mine)
        dropped == tracker[p].ms \ kept
    IN /\ tracker[p].step = "claimed" /\ txs[tracker[p].tx].state = "open"
       /\ TrackerWaits => LastStable(p) = mine
       /\ tracker' = [tracker EXCEPT ![p].step = "copying", ![p].left = kept]
       /\ IF dropped # {} /\ TrackerNamesDropped
          THEN Append1(p, Record("dropped", tracker[p].tx, dropped)) ELSE UNCHANGED log
       /\ UNCHANGED <<txs, client, received, parent, made, acks, handedOut>> /\ unchangedHistory

TrackerCopies(p) ==  \* a copy and the end of its original; messages one by one
    /\ tracker[p].step = "copying" /\ txs[tracker[p].tx].state = "open" /\ made < MaxMessages
    /\ \E m \in tracker[p].left :
         /\ Append1(p, [Record("end", tracker[p].tx, {m}) EXCEPT !.copy = made + 1])
         /\ made' = made + 1
         /\ parent' = [parent EXCEPT ![made + 1] = m]
         /\ txs' = [txs EXCEPT ![tracker[p].tx].copies = @ \cup {made + 1}, ![tracker[p].tx].copied = @ \cup {m}]
         /\ tracker' = [tracker EXCEPT ![p].left = @ \ {m}]
    /\ UNCHANGED <<client, received, acks, handedOut>> /\ unchangedHistory

TrackerCommits(p) ==
    /\ tracker[p].step = "copying" /\ tracker[p].left = {} /\ txs[tracker[p].tx].state = "open"
    /\ txs' = [txs EXCEPT ![tracker[p].tx].state = "committed"]
    /\ tracker' = [tracker EXCEPT ![p] = NoTransaction]
    /\ UNCHANGED <<log, client, received, parent, made, acks, handedOut>> /\ unchangedHistory

TrackerIsRefused(p) ==
    /\ tracker[p].tx # 0 /\ txs[tracker[p].tx].state = "aborted"
    /\ tracker' = [tracker EXCEPT ![p] = NoTransaction]
    /\ UNCHANGED <<log, txs, client, received, parent, made, acks, handedOut>> /\ unchangedHistory

(* Another tracker takes the partition over: it fences the former one and reads from the stored offset. *)
Takeover(p) ==
    /\ takeovers < MaxTakeovers /\ takeovers' = takeovers + 1
    /\ txs' = IF tracker[p].tx = 0 \/ txs[tracker[p].tx].state # "open" THEN txs
              ELSE [txs EXCEPT ![tracker[p].tx].state = "aborted"]
    /\ tracker' = [tracker EXCEPT ![p] = NoTransaction]
    /\ start' = [start EXCEPT ![p] = StoredOffset(p)]
    /\ UNCHANGED <<log, client, received, parent, made, acks, lowest, deletions, handedOut>>

(* Retention deletes markers that the tracker does not need any more (R9 keeps it from deleting others). *)
Retention(p) ==
    /\ deletions < MaxDeletions /\ deletions' = deletions + 1
    /\ StoredOffset(p) > lowest[p]
    /\ lowest' = [lowest EXCEPT ![p] = StoredOffset(p)]
    /\ start' = [start EXCEPT ![p] = StoredOffset(p)]
    /\ UNCHANGED <<log, txs, client, received, tracker, parent, made, acks, takeovers, handedOut>>

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
       \/ AliasesCount /\ log[p][i].kind = "ack" /\ log[p][i].ms \cap Ancestors(m) # {}

ToIdle(c) == client' = [client EXCEPT ![c] = NoTransaction]

ClientBegins(c) ==
    /\ client[c].step = "idle" /\ Len(txs) < MaxTransactions
    /\ \E ms \in SUBSET received[c] :
         /\ ms # {}
         /\ client' = [client EXCEPT ![c].step = "ending", ![c].tx = Len(txs) + 1, ![c].ms = ms, ![c].left = ms]
    /\ txs' = NewTransaction
    /\ UNCHANGED <<log, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

ClientEnds(c) ==
    /\ client[c].step = "ending" /\ txs[client[c].tx].state = "open"
    /\ \E m \in client[c].left :
         /\ Append1(Partition(m), Record("end", client[c].tx, {m}))
         /\ client' = [client EXCEPT ![c].left = @ \ {m},
                                     ![c].step = IF client[c].left = {m} THEN "looking" ELSE "ending"]
    /\ UNCHANGED <<txs, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

ClientLooks(c) ==
    LET mine(p) == {m \in client[c].ms : Partition(m) = p}
        refused == \E p \in Partitions : mine(p) # {} /\
            \/ ClientChecksRetention /\ lowest[p] > 1
            \/ ClientReads # "nothing" /\ HasConflict(p, client[c].tx, mine(p))
    IN /\ client[c].step = "looking" /\ txs[client[c].tx].state = "open"
       /\ IF refused
          THEN ToIdle(c) /\ txs' = [txs EXCEPT ![client[c].tx].state = "aborted"]
          ELSE client' = [client EXCEPT ![c].step = "committing"] /\ UNCHANGED txs
       /\ UNCHANGED <<log, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

ClientCommits(c) ==
    /\ client[c].step = "committing" /\ txs[client[c].tx].state = "open"
    /\ txs' = [txs EXCEPT ![client[c].tx].state = "committed", ![client[c].tx].processed = client[c].ms]
    /\ ToIdle(c)
    /\ UNCHANGED <<log, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

ClientIsRefused(c) ==
    /\ client[c].tx # 0 /\ txs[client[c].tx].state = "aborted"
    /\ ToIdle(c)
    /\ UNCHANGED <<log, txs, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

(***************************************************************************)
(* Plain acknowledgements and takes.                                       *)
(***************************************************************************)
Acknowledges(c) ==
    /\ acks < MaxAcks /\ acks' = acks + 1
    /\ \E m \in received[c] : Append1(Partition(m), Record("ack", 0, {m}))
    /\ UNCHANGED <<txs, client, received, tracker, parent, made, handedOut>> /\ unchangedHistory

Takes(c) ==
    \E m \in Existing : LET p == Partition(m) IN
        /\ IsVisible(m) /\ m \notin received[c]
        /\ \/ ~HasTake(p, m) /\ (m <= Originals => c = Owner)   \* its partition is its own; it has read the takes (R10)
           \/ c # Owner /\ m \in FetchedEarlier                 \* it fetched the message long ago and was paused
        /\ Append1(p, [Record("take", 0, {m}) EXCEPT !.generation = IF m <= Originals THEN Generation(c) ELSE 2])
        /\ received' = [received EXCEPT ![c] = @ \cup {m}]
        /\ LET position == NextPosition(p)
               from == IF FollowFrom = "claim" THEN 1 ELSE position
           IN handedOut' = IF IsAcked(p, from, position, Ancestors(m)) THEN handedOut
                           ELSE handedOut \cup {<<m, position>>}
        /\ UNCHANGED <<txs, client, tracker, parent, made, acks>> /\ unchangedHistory

SomeTransactionAborts ==
    /\ TransactionsAbort
    /\ \E t \in DOMAIN txs : txs[t].state = "open" /\ txs' = [txs EXCEPT ![t].state = "aborted"]
    /\ UNCHANGED <<log, client, received, tracker, parent, made, acks, handedOut>> /\ unchangedHistory

Next ==
    \/ SomeTransactionAborts
    \/ \E p \in Partitions :
         \/ TrackerPlans(p) \/ TrackerBegins(p) \/ TrackerDecides(p) \/ TrackerCopies(p) \/ TrackerCommits(p)
         \/ TrackerIsRefused(p) \/ Takeover(p) \/ Retention(p)
    \/ \E c \in Clients :
         \/ ClientBegins(c) \/ ClientEnds(c) \/ ClientLooks(c) \/ ClientCommits(c) \/ ClientIsRefused(c)
         \/ Acknowledges(c) \/ Takes(c)

Spec == Init /\ [][Next]_vars

-------------------------------------------------------------------------------
(***************************************************************************)
(* Invariants                                                              *)
(***************************************************************************)
Committed == {t \in DOMAIN txs : txs[t].state = "committed"}
AckedBefore(m, t) == LET p == Partition(m) IN IsAcked(p, 1, FirstOf(p, t), {m} \cup Ancestors(m))

(* Of a message and all of its copies, one at most is processed by a committed transaction. *)
ProcessedOnce == \A o \in 1..Originals :
    Cardinality({t \in Committed : \E m \in txs[t].processed : Original(m) = o}) <= 1

(* A message is processed or redelivered by one committed transaction at most. *)
OneFate == \A m \in Existing :
    Cardinality({t \in Committed : m \in txs[t].processed \cup txs[t].copied}) <= 1

(* R27, R28: no committed transaction processes or redelivers what was acknowledged before its first record. *)
AckHolds == \A t \in Committed : \A m \in txs[t].processed \cup txs[t].copied : ~AckedBefore(m, t)

(* Each original, or a copy of it, is processed, acknowledged, or not ended yet. *)
NothingLost == \A o \in 1..Originals : \E m \in Existing :
    LET p == Partition(m) IN
    /\ Original(m) = o /\ IsVisible(m)
    /\ \/ \E t \in Committed : m \in txs[t].processed
       \/ IsAcked(p, 1, NextPosition(p), {m})
       \/ ~\E i \in Positions(p) : IsCommitted(log[p][i]) /\ IsEndOf(log[p][i], m)

(* No copy is handed out whose take stands after an acknowledgement of an ancestor. *)
NoStaleHandOut == \A h \in handedOut : ~IsAcked(Partition(h[1]), 1, h[2], Ancestors(h[1]))
===============================================================================
