//! What happens in a run, for those who watch, and what its workers say.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use skep_wire::{Event, LogLine, TimedEvent};
use tokio::sync::broadcast;

use crate::history::clock;

/// How many lines of workers' logs are kept for each run.
const KEPT_LINES: usize = 10_000;
/// The longest line that is kept whole.
const LONGEST_LINE: usize = 2_000;
/// How many events are kept for those who come later. Versions are not among them.
const KEPT_EVENTS: usize = 100;

/// The events and logs of one run.
pub(crate) struct Events {
    events: broadcast::Sender<Event>,
    lines: broadcast::Sender<LogLine>,
    kept: Mutex<VecDeque<LogLine>>,
    recent: Mutex<VecDeque<TimedEvent>>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            events: broadcast::Sender::new(1024),
            lines: broadcast::Sender::new(1024),
            kept: Mutex::default(),
            recent: Mutex::default(),
        }
    }
}

impl Events {
    /// Tells those who watch; nobody needs to.
    pub(crate) fn send(&self, event: Event) {
        if !matches!(event, Event::Version { .. }) {
            let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            let id = recent.back().map_or(1, |last| last.id + 1);
            if recent.len() == KEPT_EVENTS {
                recent.pop_front();
            }
            recent.push_back(TimedEvent { id, time: clock(), event: event.clone() });
        }
        let _ = self.events.send(event);
    }

    /// The kept events after one of this id.
    pub(crate) fn since(&self, id: u64) -> Vec<TimedEvent> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().filter(|event| event.id > id).cloned().collect()
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    pub(crate) fn log(&self, mut line: LogLine) {
        if line.message.len() > LONGEST_LINE {
            line.message = line.message.chars().take(LONGEST_LINE).collect();
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line.clone());
        let _ = self.lines.send(line);
    }

    /// The kept lines, and those to come.
    pub(crate) fn lines(&self) -> (Vec<LogLine>, broadcast::Receiver<LogLine>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.iter().cloned().collect(), self.lines.subscribe())
    }
}
