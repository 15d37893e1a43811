//! What the run held and sent, as text.

use polarshard_partition::{Plan, UpdateGroup};

use crate::account::Account;
use crate::tallies::Tallies;

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

/// Calls and bytes by class and collective, as recorded and as predicted; and whether they are equal on every rank.
pub(crate) fn traffic(ranks: &[Account]) -> (String, bool) {
    let recorded = Tallies::of_world(ranks.iter().map(|rank| &rank.recorded));
    let predicted = Tallies::of_world(ranks.iter().map(|rank| &rank.predicted));
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
    let foreseen = predicted.kinds();
    let missed = foreseen.filter(|kind| !recorded.kinds().any(|known| known == *kind));
    for (class, collective) in recorded.kinds().chain(missed) {
        let tally = |tallies: &Tallies| tallies.get(class, collective);
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
        let words = [class.to_string(), collective.to_string()];
        rows.push(
            words
                .into_iter()
                .chain(numbers)
                .chain([equal.to_owned()])
                .collect(),
        );
    }
    let as_predicted = ranks.iter().all(|rank| rank.recorded == rank.predicted);
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
