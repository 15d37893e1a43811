//! What the run held and sent, as text.

use std::collections::BTreeMap;
use std::iter;

use polarshard_partition::{Call, Class, Collective, Plan, Tally, UpdateGroup, WorldSize};

use crate::account::Account;

/// The size of the model, in a line.
pub(crate) fn model(plan: &Plan) -> String {
    let params = plan.params();
    let elems = |group| {
        let members = params.iter().filter(|(_, param)| param.group() == group);
        grouped(members.map(|(_, param)| param.elems() as u64).sum())
    };
    let (muon, adamw) = (elems(UpdateGroup::Muon), elems(UpdateGroup::AdamW));
    let (matrices, blocks) = (params.matrices().len(), plan.layout().blocks().len());
    format!(
        "model: {muon} weights in {matrices} matrices are muon's, {adamw} are adamw's; blocks: {blocks}"
    )
}

/// The bytes that each rank holds, and its share of the work.
pub(crate) fn memory(ranks: &[Account]) -> String {
    type Column = fn(&Account) -> usize;
    let rows: [(&str, Column); 6] = [
        ("masters", |rank| rank.memory.masters),
        ("momentum (muon)", |rank| rank.memory.momentum),
        ("moments (adamw)", |rank| rank.memory.moments),
        ("reduced gradients", |rank| rank.memory.reduced_gradients),
        ("unreduced gradients, peak", |rank| rank.unreduced_peak),
        ("matrices orthogonalized a step", |rank| rank.orthogonalized),
    ];
    let heads = (0..ranks.len()).map(|rank| format!("rank {rank}"));
    let head: Vec<_> = ["bytes held".to_owned()].into_iter().chain(heads).collect();
    let row = |(name, column): (&str, Column)| {
        let cells = ranks.iter().map(|rank| grouped(column(rank) as u64));
        [name.to_owned()].into_iter().chain(cells).collect()
    };
    let rows: Vec<_> = [head].into_iter().chain(rows.map(row)).collect();
    aligned(1, &rows)
}

/// Calls and bytes by class and collective, as recorded and as predicted for `steps` steps; and whether they are equal
/// on every rank.
pub(crate) fn traffic(ranks: &[Account], world: WorldSize, steps: usize) -> (String, bool) {
    let recorded = tally(world, 1, ranks.iter().map(|rank| &rank.recorded));
    let predicted = tally(
        world,
        steps as u64,
        ranks.iter().map(|rank| &rank.predicted),
    );
    let head = [
        "sent, all ranks",
        "collective",
        "calls",
        "predicted",
        "bytes",
        "predicted",
        "",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let kinds = recorded
        .keys()
        .chain(predicted.keys().filter(|kind| !recorded.contains_key(kind)));
    for kind in kinds {
        let tally = |tallies: &BTreeMap<_, Tally>| tallies.get(kind).copied().unwrap_or_default();
        let (recorded, predicted) = (tally(&recorded), tally(&predicted));
        let equal = if recorded == predicted {
            "equal"
        } else {
            "DIFFERENT"
        };
        let numbers = [
            recorded.calls,
            predicted.calls,
            recorded.bytes,
            predicted.bytes,
        ]
        .map(grouped);
        let words = [kind.0.to_string(), kind.1.to_string()];
        rows.push(
            words
                .into_iter()
                .chain(numbers)
                .chain([equal.to_owned()])
                .collect(),
        );
    }
    let as_predicted = ranks.iter().all(|rank| {
        let own = |times, calls| tally(world, times, iter::once(calls));
        own(1, &rank.recorded) == own(steps as u64, &rank.predicted)
    });
    (aligned(2, &rows), as_predicted)
}

/// A whole number in groups of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Each call is made `times` times. Every rank records a collective, so those are read off rank 0; a send is recorded by
/// its sender alone.
fn tally<'a>(
    world: WorldSize,
    times: u64,
    ranks: impl Iterator<Item = &'a Vec<Call>>,
) -> BTreeMap<(Class, Collective), Tally> {
    let mut tallies = BTreeMap::<_, Tally>::new();
    for (rank, calls) in ranks.enumerate() {
        for call in calls
            .iter()
            .filter(|call| rank == 0 || call.collective == Collective::Send)
        {
            let tally = tallies.entry((call.class, call.collective)).or_default();
            *tally += Tally {
                calls: times,
                bytes: times * call.bytes_sent(world),
            };
        }
    }
    tallies
}

/// Rows in columns: the first `left` from the left, the others from the right.
fn aligned(left: usize, rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .map(|row: &Vec<String>| row[column].len())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| {
                if column < left {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            });
        format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
