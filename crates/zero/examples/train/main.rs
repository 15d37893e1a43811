//! Trains a small transformer over bytes on several ranks, and shows what sharding did: what each rank held, what the
//! ranks sent and what the plan foresaw, that all came to the same weights, and, with `--compare`, that these are the
//! weights of unsharded training.
//!
//! ```text
//! cargo run --release --example train -- --world 4 --placement whole --compare
//! ```

mod compare;
mod curve;
mod model;
mod options;
mod pictures;
mod progress;
mod table;
mod text;
mod train;

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::curve::Curve;
use crate::options::Options;
use crate::table::grouped;
use crate::text::Text;

fn main() -> Result<()> {
    let options = Options::parsed()?;
    let text = Text::read(&options)?;
    let (training, held_out) = (
        grouped(text.training_len() as u64),
        grouped(text.held_out_len() as u64),
    );
    println!("text: {training} bytes to train on, {held_out} held out");

    let started = Instant::now();
    let ranks = train::train(&options, &text)?;
    let seconds = started.elapsed().as_secs_f64();
    let curve = Curve::mean(&ranks.iter().map(|rank| &rank.curve).collect::<Vec<_>>());
    let (before, after) = curve.ends().context("the held-out text was never read")?;
    let (steps, world) = (options.steps.get(), options.world()?);
    println!("{steps} steps on {world} ranks in {seconds:.0} s");
    println!("held-out loss: {before:.3} before, {after:.3} after, nats a byte\n");
    println!("{}", table::memory(&ranks));
    let (traffic, as_predicted) = table::traffic(&ranks, world, steps);
    println!("{traffic}");

    let unsharded = match options.compare {
        true => Some(compare::train(&options, &text, &ranks[0].weights)?),
        false => None,
    };
    if let Some(unsharded) = &unsharded {
        let compare::Furthest { name, distance } = &unsharded.furthest;
        println!(
            "furthest from unsharded training: an element of {name}, by {distance:.1e} of its norm"
        );
    }

    let title = format!("{} on {world} ranks", options.optimizers());
    let loss = pictures::loss(
        &title,
        &curve,
        unsharded.as_ref().map(|unsharded| &unsharded.curve),
    );
    fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make {}", options.out.display()))?;
    for (name, picture) in [
        ("loss.svg", loss),
        ("layout.svg", pictures::layout(&ranks[0].plan)),
    ] {
        let path = options.out.join(name);
        fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
        println!("picture: {}", path.display());
    }

    let identical = ranks.iter().all(|rank| rank.identical);
    println!(
        "replicas identical: {}",
        if identical { "yes" } else { "no" }
    );
    ensure!(identical, "the ranks ended with different weights");
    ensure!(
        as_predicted,
        "the ranks sent something else than the plan foresaw"
    );
    Ok(())
}
