//! What rank 0 does with what the ranks tell it: who is let in, and who must hear of what. It does
//! no input or output itself.

use std::time::Duration;

use polarshard_partition::Rank;

use super::frame::Frame;
use super::verdict::verdict;
use crate::{Aspect, Departure, Introduction, Started, Stranger};

/// How long ranks that are asked for their calls may take.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// One connection, by the order in which it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line(pub(super) usize);

/// What is to be sent to whom.
pub(super) type Sends = Vec<(Line, Frame)>;

/// The hub of one world. Times are counted from when it was made.
#[derive(Debug)]
pub(super) struct Hub {
    /// What all ranks must agree with.
    own: Introduction,
    seats: Vec<Option<Seat>>,
    strangers: Vec<Stranger>,
    phase: Phase,
}

/// A rank that is here.
#[derive(Debug)]
struct Seat {
    line: Line,
    who: Introduction,
    is_paused: bool,
    is_done: bool,
    /// Its latest calls, once it was asked for them.
    calls: Option<Vec<Started>>,
}

#[derive(Debug)]
enum Phase {
    /// Ranks come, until then.
    Gathering { until: Duration },
    /// The world cannot come to be. Everyone who comes is told why; so many have been.
    Refused { why: Frame, told: usize },
    /// All are here. If some rank is stuck, all were asked for their calls.
    Running { asked: Option<Asked> },
    /// The world has ended, in good order or not.
    Ended,
}

#[derive(Debug)]
struct Asked {
    stuck: Started,
    deadline: Duration,
    until: Duration,
}

impl Hub {
    /// A hub for the world of `own`, which must be complete within the `deadline`.
    pub(super) fn new(own: Introduction, deadline: Duration) -> Self {
        Self {
            seats: own.world.ranks().map(|_| None).collect(),
            own,
            strangers: Vec::new(),
            phase: Phase::Gathering { until: deadline },
        }
    }

    /// Somebody has said who it is.
    pub(super) fn arrive(&mut self, line: Line, who: Introduction) -> Sends {
        if who.job != self.own.job {
            return vec![(line, Frame::OtherRun(self.own.job.clone()))];
        }
        let wrong = self.objection(&who);
        match &mut self.phase {
            Phase::Refused { why, told } => {
                *told += 1;
                vec![(line, why.clone())]
            }
            Phase::Gathering { .. } => match wrong {
                Some(why) => {
                    let mut sends = self.refuse(why.clone());
                    if let Phase::Refused { told, .. } = &mut self.phase {
                        *told += 1;
                    }
                    sends.push((line, why));
                    sends
                }
                None => self.admit(line, who),
            },
            // Too late to hurt the others.
            Phase::Running { .. } => vec![(line, wrong.unwrap_or(Frame::Closed))],
            Phase::Ended => vec![(line, Frame::Closed)],
        }
    }

    /// Somebody has come who is no rank.
    pub(super) fn note_stranger(&mut self, stranger: Stranger) {
        self.strangers.push(stranger);
    }

    /// A rank has said something.
    pub(super) fn hear(&mut self, line: Line, frame: Frame, now: Duration) -> Sends {
        let Some(rank) = self.rank_of(line) else {
            return Vec::new();
        };
        let Phase::Running { asked } = &mut self.phase else {
            let is_late =
                matches!(frame, Frame::Late) && matches!(self.phase, Phase::Gathering { .. });
            return if is_late {
                self.refuse_absence()
            } else {
                Vec::new()
            };
        };
        match frame {
            Frame::Pause => self.set_paused(rank, true),
            Frame::Resume => self.set_paused(rank, false),
            Frame::Stuck {
                sequence,
                deadline,
                calls,
            } => {
                let stuck = calls.iter().find(|call| call.sequence == sequence).cloned();
                let is_first = asked.is_none();
                if let (true, Some(stuck)) = (is_first, stuck) {
                    *asked = Some(Asked {
                        stuck,
                        deadline,
                        until: now.saturating_add(GRACE),
                    });
                }
                self.seat(rank).calls = Some(calls);
                let mut sends = self.judge(false);
                if is_first && sends.is_empty() {
                    sends.extend(self.lines(Some(rank)).map(|line| (line, Frame::Tell)));
                }
                sends
            }
            Frame::Calls(calls) => {
                self.seat(rank).calls = Some(calls);
                self.judge(false)
            }
            Frame::Payload(bytes) => self.tell_all(&Frame::Payload(bytes)),
            Frame::Failed(error) => self.end(&Frame::Failed(error)),
            Frame::Leave { how, said } => self.end(&Frame::Gone { rank, how, said }),
            Frame::Done => {
                self.seat(rank).is_done = true;
                let all = self.seats.iter().flatten().all(|seat| seat.is_done);
                if all {
                    self.end(&Frame::Over)
                } else {
                    Vec::new()
                }
            }
            // Nothing that a rank says.
            _ => Vec::new(),
        }
    }

    /// A connection is closed.
    pub(super) fn close(&mut self, line: Line) -> Sends {
        let Some(rank) = self.rank_of(line) else {
            return Vec::new();
        };
        self.seats[rank.0] = None;
        match self.phase {
            // A rank that is still looking for rank 0 may come again.
            Phase::Gathering { .. } | Phase::Refused { .. } | Phase::Ended => Vec::new(),
            Phase::Running { .. } => self.end(&Frame::Gone {
                rank,
                how: Departure::Lost,
                said: None,
            }),
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Duration) -> Sends {
        match &self.phase {
            Phase::Gathering { until } if now >= *until => self.refuse_absence(),
            Phase::Running { asked: Some(asked) } if now >= asked.until => self.judge(true),
            _ => Vec::new(),
        }
    }

    /// Whether somebody may still come who has to be told why there is no world.
    pub(super) fn is_telling(&self) -> bool {
        matches!(self.phase, Phase::Refused { told, .. } if told < self.own.world.get())
    }

    /// Whether all ranks have come and none has ended the world.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// What is wrong with one more rank.
    fn objection(&self, who: &Introduction) -> Option<Frame> {
        let seated = self.seats.get(who.rank.0).and_then(Option::as_ref);
        let other = match seated.map(|seat| &seat.who) {
            // The same process once more: its first connection did not work.
            Some(before) if before == who => return None,
            Some(before) => before,
            None if who.rank == self.own.rank && who.process == self.own.process => return None,
            None => &self.own,
        };
        Aspect::of(other, who).map(|_| Frame::Disagree(other.clone(), who.clone()))
    }

    fn admit(&mut self, line: Line, who: Introduction) -> Sends {
        let rank = who.rank;
        self.seats[rank.0] = Some(Seat {
            line,
            who,
            is_paused: false,
            is_done: false,
            calls: None,
        });
        if self.seats.iter().any(Option::is_none) {
            return Vec::new();
        }
        self.phase = Phase::Running { asked: None };
        self.tell_all(&Frame::Begin)
    }

    fn refuse_absence(&mut self) -> Sends {
        let missing = absent(&self.seats).collect();
        let strangers = self.strangers.clone();
        self.refuse(Frame::Absent { missing, strangers })
    }

    fn refuse(&mut self, why: Frame) -> Sends {
        let sends = self.tell_all(&why);
        let told = sends.len();
        self.phase = Phase::Refused { why, told };
        sends
    }

    fn set_paused(&mut self, rank: Rank, is_paused: bool) -> Sends {
        let before = self.is_paused();
        self.seat(rank).is_paused = is_paused;
        if self.is_paused() == before {
            return Vec::new();
        }
        self.tell_all(&Frame::Paused(is_paused))
    }

    fn is_paused(&self) -> bool {
        self.seats.iter().flatten().any(|seat| seat.is_paused)
    }

    /// Ends the world if some rank is stuck and all have told their calls, or will not.
    fn judge(&mut self, is_late: bool) -> Sends {
        let Phase::Running { asked: Some(asked) } = &self.phase else {
            return Vec::new();
        };
        let calls: Vec<Option<&[Started]>> = self
            .seats
            .iter()
            .map(|seat| seat.as_ref().and_then(|seat| seat.calls.as_deref()))
            .collect();
        if !is_late && calls.iter().any(Option::is_none) {
            return Vec::new();
        }
        let error = verdict(&asked.stuck, asked.deadline, &calls);
        self.end(&Frame::Failed(error))
    }

    fn end(&mut self, how: &Frame) -> Sends {
        self.phase = Phase::Ended;
        self.tell_all(how)
    }

    /// Rank 0 last: its process may end as soon as it is told.
    fn tell_all(&self, frame: &Frame) -> Sends {
        self.lines(None).map(|line| (line, frame.clone())).collect()
    }

    fn lines(&self, except: Option<Rank>) -> impl Iterator<Item = Line> {
        let seats = self.seats.iter().flatten().rev();
        seats
            .filter(move |seat| Some(seat.who.rank) != except)
            .map(|seat| seat.line)
    }

    fn rank_of(&self, line: Line) -> Option<Rank> {
        let mut seats = self.seats.iter().flatten();
        let seat = seats.find(|seat| seat.line == line)?;
        Some(seat.who.rank)
    }

    /// # Panics
    /// If the rank is not here; [`rank_of`](Self::rank_of) has found it.
    fn seat(&mut self, rank: Rank) -> &mut Seat {
        self.seats[rank.0].as_mut().expect("the rank has a seat")
    }
}

fn absent<T>(seats: &[Option<T>]) -> impl Iterator<Item = Rank> {
    let ranks = seats.iter().enumerate();
    ranks
        .filter(|(_, seat)| seat.is_none())
        .map(|(rank, _)| Rank(rank))
}
