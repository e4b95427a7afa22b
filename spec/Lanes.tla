-------------------------------- MODULE Lanes ---------------------------------
(***************************************************************************)
(* A queue with a retry lane (rules R46 and R47 of docs/rules.md).         *)
(* spec/README.md: how to run the model.                                   *)
(*                                                                         *)
(* There is one partition of each lane, the main one and the retry one,    *)
(* each with markers of its own.  `log` has the markers of both in the     *)
(* order in which they were written, which nobody sees: clients and        *)
(* trackers know only positions in one of the two.  What a tracker's       *)
(* transaction does to messages of its lane is the matter of Delivery.tla; *)
(* here it reads its own markers when it begins, and may commit later.     *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    \* --- bounds ---
    Clients,
    Originals,        \* messages that were sent to the main lane
    MaxMessages,      \* these and their copies
    MaxAcks,          \* by users; clients end more, unseen
    MaxRefusals,      \* how often the retry lane can be written no more, or again
    \* --- the rules; each FALSE is a negative control ---
    ReadsToItsEnd,    \* who looks into another lane reads to its end, not to his own position
    AsksAfterTake,    \* he asks for that end when his own start marker is confirmed
    FallsBack,        \* copies stay in their own lane while the retry lane can't be written
    RemovedWhenEmpty, \* a lane is removed when all of its messages are finished
    RemovedWhenQuiet  \* ... and all trackers know, and no transaction from before is open

VARIABLES
    log,       \* markers: takes, and ends of clients and trackers
    messages,  \* the sequence of those that can be read
    client,    \* client -> what it does
    received,  \* pairs of a message that was handed out, and when it was taken
    acks,
    tracker,   \* lane -> its transaction
    lane,      \* the retry lane: "there", "draining" or "removed"
    knows,     \* lane -> what its tracker takes the retry lane for
    writable, refusals

vars == <<log, messages, client, received, acks, tracker, lane, knows, writable, refusals>>

Lanes == {"main", "retry"}

Of(l) == {i \in DOMAIN log : log[i].lane = l}
End(l) == Cardinality(Of(l))
Position(i) == Cardinality({j \in Of(log[i].lane) : j < i})

Exists(l) == l = "main" \/ lane # "removed"
LaneOf(m) == messages[m].lane
Marker(kind, m) == [lane |-> LaneOf(m), kind |-> kind, m |-> m]

Is(m, kinds) == {i \in DOMAIN log : log[i].m = m /\ log[i].kind \in kinds}
Taken(m) == Is(m, {"take"}) # {}
Ended(m) == Is(m, {"ack", "unseen", "moved"}) # {}
InFlight(m) == Taken(m) /\ ~Ended(m)

RECURSIVE Ancestors(_)
Ancestors(m) == IF messages[m].parent = 0 THEN {} ELSE {messages[m].parent} \cup Ancestors(messages[m].parent)

(***************************************************************************)
(* Clients                                                                 *)
(***************************************************************************)
Idle == [phase |-> "idle", m |-> 0, ends |-> [l \in Lanes |-> 0]]

Ends == [l \in Lanes |-> End(l)]

Fetches(c) ==
    /\ client[c].phase = "idle"
    /\ \E m \in DOMAIN messages :
        /\ Exists(LaneOf(m)) /\ ~Taken(m)
        /\ \A d \in Clients : client[d].m # m
        /\ client' = [client EXCEPT ![c] = [phase |-> "fetched", m |-> m, ends |-> Ends]]
    /\ UNCHANGED <<log, messages, received, acks, tracker, lane, knows, writable, refusals>>

Takes(c) ==
    /\ client[c].phase = "fetched" /\ Exists(LaneOf(client[c].m))
    /\ log' = Append(log, Marker("take", client[c].m))
    /\ client' = [client EXCEPT ![c].phase = "taken"]
    /\ UNCHANGED <<messages, received, acks, tracker, lane, knows, writable, refusals>>

Asks(c) ==
    /\ client[c].phase = "taken"
    /\ LET own == LaneOf(client[c].m)
           seen(l) == IF ~ReadsToItsEnd \/ l = own THEN End(own)
                      ELSE IF AsksAfterTake THEN End(l) ELSE client[c].ends[l]
       IN client' = [client EXCEPT ![c].phase = "asked", ![c].ends = [l \in Lanes |-> seen(l)]]
    /\ UNCHANGED <<log, messages, received, acks, tracker, lane, knows, writable, refusals>>

(* Of each lane that the copy names, what stands between the two positions.  `planned` has for each lane where
   its markers ended when the first copy from there was planned, plus 1; 0: there is none. *)
Finds(m, ends) ==
    \E a \in Ancestors(m) : \E i \in Is(a, {"ack", "unseen"}) :
        LET l == LaneOf(a)
        IN messages[m].planned[l] > 0 /\ Position(i) + 1 >= messages[m].planned[l] /\ Position(i) < ends[l]

Looks(c) ==
    /\ client[c].phase = "asked"
    /\ LET m == client[c].m
       IN IF Finds(m, client[c].ends)
          THEN log' = Append(log, Marker("unseen", m)) /\ UNCHANGED received
          ELSE received' = received \cup {<<m, CHOOSE i \in Is(m, {"take"}) : TRUE>>} /\ UNCHANGED log
    /\ client' = [client EXCEPT ![c] = Idle]
    /\ UNCHANGED <<messages, acks, tracker, lane, knows, writable, refusals>>

(* Of any message that somebody was handed out, at any time. *)
Acknowledges ==
    /\ acks < MaxAcks
    /\ acks' = acks + 1
    /\ \E one \in received :
        /\ Exists(LaneOf(one[1])) /\ Is(one[1], {"ack"}) = {}
        /\ log' = Append(log, Marker("ack", one[1]))
    /\ UNCHANGED <<messages, client, received, tracker, lane, knows, writable, refusals>>

(***************************************************************************)
(* Trackers, one for each lane.  Leases may be over at any time.           *)
(***************************************************************************)
NoTransaction == [m |-> 0, target |-> "none", planned |-> [l \in Lanes |-> 0]]

Target(l) == IF l = "main" /\ knows[l] = "there" /\ (writable \/ ~FallsBack) THEN "retry" ELSE l

TrackerBegins(l) ==
    /\ tracker[l] = NoTransaction /\ Exists(l)
    /\ \E m \in DOMAIN messages :
        /\ LaneOf(m) = l /\ InFlight(m)
        /\ LET before == messages[m].planned
               planned == IF before[l] > 0 THEN before ELSE [before EXCEPT ![l] = End(l) + 1]
           IN tracker' = [tracker EXCEPT ![l] = [m |-> m, target |-> Target(l), planned |-> planned]]
    /\ UNCHANGED <<log, messages, client, received, acks, lane, knows, writable, refusals>>

(* What was written before the topic was deleted commits all the same. *)
TrackerCommits(l) ==
    /\ tracker[l] # NoTransaction /\ Len(messages) < MaxMessages
    /\ LET tx == tracker[l]
       IN /\ tx.target = "retry" => writable /\ knows[l] # "removed"
          /\ log' = Append(log, Marker("moved", tx.m))
          /\ messages' = Append(messages, [lane |-> tx.target, parent |-> tx.m, planned |-> tx.planned])
    /\ tracker' = [tracker EXCEPT ![l] = NoTransaction]
    /\ UNCHANGED <<client, received, acks, lane, knows, writable, refusals>>

TrackerAborts(l) ==
    /\ tracker[l] # NoTransaction
    /\ tracker' = [tracker EXCEPT ![l] = NoTransaction]
    /\ UNCHANGED <<log, messages, client, received, acks, lane, knows, writable, refusals>>

TrackerHears(l) ==
    /\ knows[l] # lane
    /\ knows' = [knows EXCEPT ![l] = lane]
    /\ UNCHANGED <<log, messages, client, received, acks, tracker, lane, writable, refusals>>

(***************************************************************************)
(* What happens to the retry lane                                          *)
(***************************************************************************)
Refuses ==
    /\ refusals < MaxRefusals
    /\ refusals' = refusals + 1
    /\ writable' = ~writable
    /\ UNCHANGED <<log, messages, client, received, acks, tracker, lane, knows>>

Drains ==
    /\ lane = "there"
    /\ lane' = "draining"
    /\ UNCHANGED <<log, messages, client, received, acks, tracker, knows, writable, refusals>>

Removed ==
    /\ lane = "draining"
    /\ RemovedWhenEmpty => \A m \in DOMAIN messages : LaneOf(m) = "retry" => Ended(m)
    /\ RemovedWhenQuiet => \A l \in Lanes : knows[l] # "there" /\ tracker[l].target # "retry"
    /\ lane' = "removed"
    /\ client' = [c \in Clients |->
                    IF client[c].m # 0 /\ LaneOf(client[c].m) = "retry" THEN Idle ELSE client[c]]
    /\ UNCHANGED <<log, messages, received, acks, tracker, knows, writable, refusals>>

Init ==
    /\ log = <<>>
    /\ messages = [m \in 1..Originals |-> [lane |-> "main", parent |-> 0, planned |-> [l \in Lanes |-> 0]]]
    /\ client = [c \in Clients |-> Idle]
    /\ received = {}
    /\ acks = 0
    /\ tracker = [l \in Lanes |-> NoTransaction]
    /\ lane = "there"
    /\ knows = [l \in Lanes |-> "there"]
    /\ writable = TRUE
    /\ refusals = 0

Next ==
    \/ \E c \in Clients : Fetches(c) \/ Takes(c) \/ Asks(c) \/ Looks(c)
    \/ Acknowledges
    \/ \E l \in Lanes : TrackerBegins(l) \/ TrackerCommits(l) \/ TrackerAborts(l) \/ TrackerHears(l)
    \/ Refuses \/ Drains \/ Removed

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* Invariants                                                              *)
(***************************************************************************)

(* R46: no copy is handed out that was taken after an ancestor was acknowledged, in whichever lane. *)
NoStaleHandOut ==
    \A one \in received : \A a \in Ancestors(one[1]) : \A i \in Is(a, {"ack", "unseen"}) : i > one[2]

(* R47: each message, or a copy of it, is acknowledged, or can still be read and is not finished. *)
NothingLost ==
    \A o \in 1..Originals : \E m \in DOMAIN messages :
        /\ m = o \/ o \in Ancestors(m)
        /\ Is(m, {"ack"}) # {} \/ (~Ended(m) /\ Exists(LaneOf(m)))

(* R47: a message of the main lane can be redelivered, whatever the retry lane does. *)
NothingHeldUp ==
    \A m \in DOMAIN messages :
        (LaneOf(m) = "main" /\ InFlight(m) /\ Target("main") = "retry") => writable
===============================================================================
