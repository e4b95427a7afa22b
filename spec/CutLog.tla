-------------------------------- MODULE CutLog --------------------------------
(***************************************************************************)
(* What a number names when the log of a queue is cut back (rule R39 of    *)
(* docs/rules.md).  spec/README.md: how to run the model.                  *)
(*                                                                         *)
(* There is one partition of a queue, and its markers.  An election may    *)
(* cut back the log of the queue at any time, and raises the leader epoch; *)
(* each record keeps the epoch in which it was written.  Markers are never *)
(* cut back.  Offsets begin at 1.                                          *)
(*                                                                         *)
(* A number is a pair: the epoch of the cut behind which a message stands, *)
(* 0 without one, and its offset.                                          *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    \* --- bounds ---
    Clients,
    MaxMessages,
    MaxCuts,          \* elections that cut the log back
    MaxElections,     \* elections that do not
    MaxAssignments,
    MaxTrackerTicks,
    MaxEnds,          \* end markers, of clients and trackers
    \* --- the rules; each FALSE (LateTakes: TRUE) is a negative control ---
    NumbersHaveEpochs,  \* behind a cut, its epoch is a part of each number
    ClientsLook,        \* who sees a higher epoch than he knows looks whether the log was cut back
    PositionGoesBack,   \* whoever finds a cut reads again from its start
    TicksComeFirst,     \* he takes nothing until he has read in a tick that all readers know the same cuts
    TrackersLook,       \* a tracker copies no original with a higher epoch than its take could have
    LateTakes           \* who fetched a message and lost the partition may take it all the same: a gap

VARIABLES
    log,        \* the queue: a sequence of records, each with the message and the epoch
    epoch,      \* the leader epoch
    markers,    \* takes, ends and ticks
    sent,       \* how many messages were sent
    owner,      \* the client that has the partition; "none": nobody
    client,     \* client -> what it knows
    received,   \* client -> the takes whose messages it was handed out
    copied,     \* pairs: whose copy was to be made, and whose was made
    cutBacks, elections, assignments, trackerTicks

vars == <<log, epoch, markers, sent, owner, client, received, copied, cutBacks, elections, assignments,
          trackerTicks>>

Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Max(S) == CHOOSE x \in S : \A y \in S : x >= y

(***************************************************************************)
(* Cuts, as in kmqpy/kafka/markers/log_cuts.py: from `start` on the log    *)
(* was written anew, first in `epoch`; a record of epoch `above`, or a     *)
(* lower one, was cut away.                                                *)
(***************************************************************************)
Cut(e, start, above) == [epoch |-> e, start |-> start, above |-> above]

Knows(cuts, cut) ==
    \E k \in cuts : k.epoch = cut.epoch \/ (k.start <= cut.start /\ k.epoch > cut.above)

With(cuts, cut) ==
    IF Knows(cuts, cut) THEN cuts
    ELSE {k \in cuts : k.start < cut.start \/ k.epoch > cut.epoch} \cup {cut}

RECURSIVE Merged(_, _)
Merged(cuts, others) ==
    IF others = {} THEN cuts
    ELSE LET first == CHOOSE k \in others : \A l \in others : k.epoch <= l.epoch
         IN Merged(With(cuts, first), others \ {first})

Number(cuts, offset) ==
    <<IF NumbersHaveEpochs THEN Max({0} \cup {k.epoch : k \in {l \in cuts : l.start <= offset}}) ELSE 0, offset>>

IsCurrent(cuts, number) == Number(cuts, number[2]) = number

(* The cut that took away the record which stood at this offset in epoch e; none if it is still there. *)
Found(offset, e) ==
    IF offset = 0 \/ (offset <= Len(log) /\ log[offset].epoch <= e) THEN {}
    ELSE LET start == 1 + Max({0} \cup {i \in 1..Len(log) : i < offset /\ log[i].epoch <= e})
         IN {Cut(IF start <= Len(log) THEN log[start].epoch ELSE Max({epoch, e + 1}), start, e)}

(***************************************************************************)
(* What a reader of the markers knows: the cuts, the highest offset that   *)
(* was taken and in which epoch at most, takes, and ends.  A tick tells    *)
(* the highest epoch that its client has seen; one of a tracker, none      *)
(* (kmqpy's claims do, but of copies, which the model does not have).      *)
(***************************************************************************)
Marker(kind, number, id, cuts, e) == [kind |-> kind, number |-> number, id |-> id, cuts |-> cuts, epoch |-> e]
Tick(cuts, e) == Marker("tick", <<0, 0>>, 0, cuts, e)

Nothing == [cuts |-> {}, epoch |-> 0, last |-> 0, lastEpoch |-> 0, taken |-> {}, ended |-> {}]

AfterTick(v, m) ==
    LET cuts == Merged(v.cuts, m.cuts)
        new == cuts \ v.cuts
        start == Min({k.start : k \in new})
        keeps(number) == number[2] < start \/ IsCurrent(cuts, number)
        known == IF m.epoch > v.epoch THEN [v EXCEPT !.epoch = m.epoch] ELSE v
    IN IF new = {} THEN known
       ELSE [known EXCEPT !.cuts = cuts,
                          !.last = Min({v.last, start - 1}),
                          !.taken = {t \in v.taken : keeps(t.number)},
                          !.ended = {t \in v.ended : keeps(t.number)}]

AfterTake(v, m) ==
    IF ~IsCurrent(v.cuts, m.number) THEN v
    ELSE LET one == [v EXCEPT !.taken = @ \cup {[number |-> m.number, id |-> m.id, epoch |-> v.epoch]}]
         IN IF m.number[2] > v.last THEN [one EXCEPT !.last = m.number[2], !.lastEpoch = v.epoch] ELSE one

AfterEnd(v, m) ==
    IF IsCurrent(v.cuts, m.number) THEN [v EXCEPT !.ended = @ \cup {[number |-> m.number, id |-> m.id]}] ELSE v

RECURSIVE ViewOf(_)
ViewOf(ms) ==
    IF ms = <<>> THEN Nothing
    ELSE LET v == ViewOf(SubSeq(ms, 1, Len(ms) - 1))
             m == ms[Len(ms)]
         IN CASE m.kind = "tick" -> AfterTick(v, m)
              [] m.kind = "take" -> AfterTake(v, m)
              [] OTHER -> AfterEnd(v, m)

View == ViewOf(markers)

(***************************************************************************)
(* Kafka                                                                   *)
(***************************************************************************)
Send ==
    /\ sent < MaxMessages
    /\ sent' = sent + 1
    /\ log' = Append(log, [id |-> sent + 1, epoch |-> epoch])
    /\ UNCHANGED <<epoch, markers, owner, client, received, copied, cutBacks, elections, assignments, trackerTicks>>

Elect(n) ==
    /\ epoch' = epoch + 1
    /\ log' = SubSeq(log, 1, n)
    /\ IF n < Len(log) THEN cutBacks < MaxCuts /\ cutBacks' = cutBacks + 1 /\ UNCHANGED elections
       ELSE elections < MaxElections /\ elections' = elections + 1 /\ UNCHANGED cutBacks
    /\ UNCHANGED <<markers, sent, owner, client, received, copied, assignments, trackerTicks>>

(***************************************************************************)
(* Clients                                                                 *)
(***************************************************************************)
NoRecord == [id |-> 0, epoch |-> 0]
Idle == [phase |-> "idle", cuts |-> {}, epoch |-> 0, position |-> 1, isTold |-> TRUE, tickAt |-> 0,
         fetched |-> NoRecord]

Assign(c) ==
    /\ assignments < MaxAssignments
    /\ owner # c
    /\ assignments' = assignments + 1
    /\ owner' = c
    /\ client' = [x \in Clients |->
                    IF x = c THEN [Idle EXCEPT !.phase = "look"]
                    ELSE IF LateTakes /\ client[x].phase = "fetched" THEN client[x] ELSE Idle]
    /\ UNCHANGED <<log, epoch, markers, sent, received, copied, cutBacks, elections, trackerTicks>>

Look(c) ==
    /\ owner = c /\ client[c].phase = "look"
    /\ LET v == View
           found == IF ClientsLook THEN Found(v.last, v.lastEpoch) ELSE {}
           cuts == Merged(v.cuts, found)
           back == {k.start : k \in cuts \ v.cuts}
       IN client' = [client EXCEPT ![c] =
              [Idle EXCEPT !.phase = IF TicksComeFirst THEN "tick" ELSE "ready",
                           !.isTold = FALSE,
                           !.cuts = cuts,
                           !.epoch = epoch,
                           !.position = IF PositionGoesBack THEN Min({v.last + 1} \cup back) ELSE v.last + 1]]
    /\ UNCHANGED <<log, epoch, markers, sent, owner, received, copied, cutBacks, elections, assignments, trackerTicks>>

WriteTick(c) ==
    /\ owner = c /\ ~client[c].isTold
    /\ markers' = Append(markers, Tick(client[c].cuts, client[c].epoch))
    /\ client' = [client EXCEPT ![c].phase = IF @ = "tick" THEN "confirm" ELSE @,
                                ![c].isTold = TRUE,
                                ![c].tickAt = Len(markers) + 1]
    /\ UNCHANGED <<log, epoch, sent, owner, received, copied, cutBacks, elections, assignments, trackerTicks>>

Confirm(c) ==
    /\ owner = c /\ client[c].phase = "confirm"
    /\ LET told == ViewOf(SubSeq(markers, 1, client[c].tickAt)).cuts
       IN client' = [client EXCEPT ![c].phase = IF told = client[c].cuts THEN "ready" ELSE "look"]
    /\ UNCHANGED <<log, epoch, markers, sent, owner, received, copied, cutBacks, elections, assignments, trackerTicks>>

Fetch(c) ==
    /\ owner = c /\ client[c].phase = "ready"
    /\ LET at == client[c].position
           isShort == Len(log) + 1 < at
       IN /\ at <= Len(log) \/ isShort
          /\ IF ClientsLook /\ (isShort \/ log[at].epoch > client[c].epoch)
             THEN client' = [client EXCEPT ![c].phase = "look"]
             ELSE /\ ~isShort
                  /\ client' = [client EXCEPT ![c].phase = "fetched", ![c].fetched = log[at]]
    /\ UNCHANGED <<log, epoch, markers, sent, owner, received, copied, cutBacks, elections, assignments, trackerTicks>>

Take(c) ==
    /\ client[c].phase = "fetched"
    /\ owner = c \/ LateTakes
    /\ LET number == Number(client[c].cuts, client[c].position)
           id == client[c].fetched.id
       IN /\ markers' = Append(markers, Marker("take", number, id, {}, 0))
          /\ received' = [received EXCEPT ![c] = @ \cup {<<number, id>>}]
    /\ client' = [client EXCEPT ![c] =
                    IF owner = c THEN [@ EXCEPT !.phase = "ready", !.position = @ + 1, !.fetched = NoRecord]
                    ELSE Idle]
    /\ UNCHANGED <<log, epoch, sent, owner, copied, cutBacks, elections, assignments, trackerTicks>>

Ends == {i \in DOMAIN markers : markers[i].kind = "end"}
MayEnd == Cardinality(Ends) < MaxEnds

(* Its user may acknowledge a message at any time. *)
End(c) ==
    /\ MayEnd
    /\ \E one \in received[c] :
        /\ markers' = Append(markers, Marker("end", one[1], one[2], {}, 0))
        /\ received' = [received EXCEPT ![c] = @ \ {one}]
    /\ UNCHANGED <<log, epoch, sent, owner, client, copied, cutBacks, elections, assignments, trackerTicks>>

(***************************************************************************)
(* A tracker redelivers a message whose lease is over, at any time: it     *)
(* knows all markers before its claim (see Delivery.tla).                  *)
(***************************************************************************)
Redeliver ==
    /\ \E t \in View.taken :
        LET at == t.number[2]
            cuts == Merged(View.cuts, Found(at, t.epoch))
            isGone == at > Len(log) \/ (TrackersLook /\ log[at].epoch > t.epoch)
        IN /\ ~\E e \in View.ended : e.number = t.number
           /\ IF isGone
              THEN /\ trackerTicks < MaxTrackerTicks
                   /\ cuts # View.cuts
                   /\ trackerTicks' = trackerTicks + 1
                   /\ markers' = Append(markers, Tick(cuts, 0))
                   /\ UNCHANGED copied
              ELSE /\ MayEnd
                   /\ copied' = copied \cup {<<t.id, log[at].id>>}
                   /\ markers' = Append(markers, Marker("end", t.number, t.id, {}, 0))
                   /\ UNCHANGED trackerTicks
    /\ UNCHANGED <<log, epoch, sent, owner, client, received, cutBacks, elections, assignments>>

Init ==
    /\ log = <<>> /\ epoch = 0 /\ markers = <<>> /\ sent = 0 /\ owner = "none"
    /\ client = [c \in Clients |-> Idle]
    /\ received = [c \in Clients |-> {}]
    /\ copied = {}
    /\ cutBacks = 0 /\ elections = 0 /\ assignments = 0 /\ trackerTicks = 0

Next ==
    \/ Send
    \/ \E n \in 0..Len(log) : Elect(n)
    \/ \E c \in Clients :
        Assign(c) \/ Look(c) \/ WriteTick(c) \/ Confirm(c) \/ Fetch(c) \/ Take(c) \/ End(c)
    \/ Redeliver

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* Invariants.  Those of what stands in the log now are of times when the  *)
(* owner knows of the last election: before, nobody can know.              *)
(***************************************************************************)
Takes == {markers[i] : i \in {j \in DOMAIN markers : markers[j].kind = "take"}}

OneName == \A s, t \in Takes : s.number = t.number => s.id = t.id

CopiesAreTheirs == \A pair \in copied : pair[1] = pair[2]

OwnerIsCurrent == owner # "none" /\ client[owner].phase \in {"ready", "fetched"} /\ client[owner].epoch = epoch

(* What counts as acknowledged was acknowledged, and not another message that stood there. *)
EndsAreTheirs ==
    OwnerIsCurrent =>
        LET v == View
        IN \A at \in DOMAIN log : \A e \in v.ended : e.number = Number(v.cuts, at) => e.id = log[at].id

(* What its owner has passed was taken, by the number that all readers have for it. *)
NothingLost ==
    OwnerIsCurrent =>
        LET v == View
        IN \A at \in DOMAIN log :
            at < client[owner].position =>
                \E t \in v.taken : t.number = Number(v.cuts, at) /\ t.id = log[at].id
=============================================================================
