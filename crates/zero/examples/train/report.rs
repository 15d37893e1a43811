//! What a run comes to: the tables, the pictures, and whether all is as it should be.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::compare::{self, Furthest};
use crate::curve::Curve;
use crate::options::Options;
use crate::pictures;
use crate::saved::Saved;
use crate::table;
use crate::text::Text;
use crate::train::Run;

/// Tells of a run that took this long, and draws it, beside an earlier one's curve if there is one.
///
/// # Errors
/// If the ranks ended with different weights or sent something else than the plan foresaw.
pub(crate) fn tell(
    options: &Options,
    text: &Text,
    run: &Run,
    took: Duration,
    beside: Option<Saved>,
) -> Result<()> {
    let ranks = &run.accounts;
    let curve = Curve::mean(&ranks.iter().map(|rank| &rank.curve).collect::<Vec<_>>());
    let (before, after) = curve.ends().context("the held-out text was never read")?;
    let (steps, world) = (run.steps.len(), run.plan.layout().world());
    println!(
        "{} on {} in {:.0} s",
        counted(steps, "step"),
        counted(world.get(), "rank"),
        took.as_secs_f64()
    );
    println!("held-out loss: {before:.3} before, {after:.3} after, nats a byte\n");
    println!("{}", table::memory(ranks));
    let (traffic, as_predicted) = table::traffic(ranks);
    println!("{traffic}");

    let mut other = beside;
    if options.compare {
        let unsharded = compare::train(options, text, run)?;
        let Furthest { name, distance } = &unsharded.furthest;
        println!("furthest from unsharded training: {name}, by {distance:.1e} of its norm");
        other = Some(Saved {
            title: "unsharded".to_owned(),
            curve: unsharded.curve,
        });
    }
    let identical = ranks.iter().all(|rank| rank.identical);
    let done = run.steps.clone().map(|step| step + 1);
    let times = match done.filter(|done| options.verifies_after(*done)).count() {
        0 => String::new(),
        times => format!(", and {} on the way", counted(times, "time")),
    };
    println!(
        "replicas identical: {}{times}",
        if identical { "yes" } else { "no" }
    );
    if let Some(folder) = &options.save {
        println!(
            "checkpoint: {}, after step {}",
            folder.display(),
            run.steps.end
        );
    }
    draw(options, run, curve, other.as_ref())?;
    ensure!(identical, "the ranks ended with different weights");
    ensure!(
        as_predicted,
        "the ranks sent something else than the plan foresaw"
    );
    Ok(())
}

/// Writes the pictures and the curve.
fn draw(options: &Options, run: &Run, curve: Curve, other: Option<&Saved>) -> Result<()> {
    let title = options.title(run.plan.layout().world());
    let other = other.map(|other| (other.title.as_str(), &other.curve));
    for (name, picture) in [
        ("loss.svg", pictures::loss(&title, &curve, other)),
        ("layout.svg", pictures::layout(&run.plan)),
    ] {
        let path = options.out.join(name);
        fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
        println!("picture: {}", path.display());
    }
    let path = options.out.join("loss.json");
    Saved { title, curve }.write(&path)?;
    println!("curve: {}", path.display());
    Ok(())
}

/// `1 step`, `2 steps`.
fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
