//! How far a run is, while it goes on.

use std::ops::Range;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over the steps, drawn on a terminal only; of several ranks, one shows it.
pub(crate) fn bar(steps: &Range<usize>, shown: bool) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps.end as u64);
    bar.set_position(steps.start as u64);
    // The steps before took no time of this run.
    bar.reset_eta();
    let template = "{bar:40} step {pos} of {len}, loss {msg}, {elapsed} ({eta} left)";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// One step further, with its loss.
pub(crate) fn advance(bar: &ProgressBar, loss: f64) {
    bar.set_message(format!("{loss:.3}"));
    bar.inc(1);
}
