//! How a checkpoint is written: each parameter by the rank that owns most of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use polarshard_comm::{Op, Request};
use polarshard_partition::{Class, ParamId, Plan, Rank, Span};

use super::index::Index;
use super::names::{MOST, Names};
use super::tensor_file::TensorFileWriter;
use super::{Kind, all_come, durable, together};
use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::flat;
use crate::step::{Fragments, Shard, SliceState};

/// Writes the state after `step` steps to a folder. All ranks call it with the same folder.
pub(crate) fn save(channel: &mut Channel, shard: &Shard, step: u64, folder: &Path) -> Result<()> {
    let _paused = all_come(channel)?;
    let rank = channel.rank();
    // A rank may see an older state of the folder; one that was given another folder must not write over what it has.
    let numbers = channel.collect_in_order(&[Index::next_number(folder) as f64])?;
    let number = numbers.iter().map(|of_rank| of_rank[0] as u64).max();
    let number = number.expect("a world has ranks");
    if number >= MOST {
        let reason =
            format!("no checkpoint can have the number {number}, after one that the folder has");
        return Err(Error::checkpoint(folder, std::io::Error::other(reason)));
    }
    let names = Names { number, step };
    let writer = begin(shard.plan(), rank, names, folder);
    let written = match writer {
        Ok(writer) => write_all(channel, shard, writer),
        // The other ranks wait for this one's slices.
        Err(error) => write_all(channel, shard, None).and(Err(error)),
    };
    let remove_own = |error: &Error| {
        // No index will name it; but after a fatal error others may have gone on to the index.
        if !error.is_fatal() {
            let path = folder.join(names.of(rank));
            let _ = fs::remove_file(durable::beside(&path));
            let _ = fs::remove_file(path);
        }
    };
    together(channel, written).inspect_err(remove_own)?;
    let index = (rank == Rank(0)).then(|| index(shard, names));
    let index = index.as_ref();
    let found = index.map_or(Ok(()), |index| index.check_files(folder));
    together(channel, found).inspect_err(remove_own)?;
    together(channel, index.map_or(Ok(()), |index| index.replace(folder)))
}

fn index(shard: &Shard, names: Names) -> Index {
    let params = shard.plan().params();
    let files = params
        .iter()
        .filter_map(|(id, param)| Some((param.name.clone(), names.of(writer(shard.plan(), id)?))))
        .collect();
    let steps = params
        .iter()
        .zip(&shard.adamw_steps)
        .map(|((_, param), steps)| (param.name.clone(), *steps));
    Index::new(names.number, names.step, files, steps.collect())
}

/// Begins a rank's file; a rank that writes no parameter has none.
fn begin(plan: &Plan, rank: Rank, names: Names, folder: &Path) -> Result<Option<TensorFileWriter>> {
    fs::create_dir_all(folder).map_err(|error| Error::checkpoint(folder, error))?;
    let own = plan
        .params()
        .iter()
        .filter(|(id, _)| writer(plan, *id) == Some(rank));
    let tensors: Vec<_> = own
        .flat_map(|(_, param)| {
            Kind::of(param.group())
                .iter()
                .map(|kind| (kind.key(&param.name), param.shape.to_vec()))
        })
        .collect();
    if tensors.is_empty() {
        return Ok(None);
    }
    TensorFileWriter::create(folder.join(names.of(rank)), &tensors).map(Some)
}

/// Sends every window of every tensor to its writer. Without a file of its own this rank only sends.
fn write_all(
    channel: &mut Channel,
    shard: &Shard,
    mut file: Option<TensorFileWriter>,
) -> Result<()> {
    let plan = shard.plan();
    let window = plan.layout().bucket_size().get();
    let mut written = Ok(());
    for (id, param) in plan.params().iter() {
        let Some(writer) = writer(plan, id) else {
            continue;
        };
        for kind in Kind::of(param.group()) {
            let own = fragments(shard, *kind, id)?;
            for start in (0..param.elems()).step_by(window) {
                let span = Span::new(start, param.elems().min(start + window));
                let values = gather(channel, plan, id, span, writer, &own, shard.device())?;
                if let (Some(values), Some(file), Ok(())) = (values, &mut file, &written) {
                    written = file.append(&kind.key(&param.name), &values);
                }
            }
        }
    }
    written?;
    file.map_or(Ok(()), TensorFileWriter::finish)
}

/// The rank that writes a parameter: the one with its largest slice.
fn writer(plan: &Plan, param: ParamId) -> Option<Rank> {
    let mut elems = BTreeMap::<Rank, usize>::new();
    for slice in plan.layout().slices(param) {
        *elems.entry(slice.rank).or_default() += slice.span.len();
    }
    elems
        .into_iter()
        .rev()
        .max_by_key(|(_, elems)| *elems)
        .map(|(rank, _)| rank)
}

/// This rank's slices of one tensor, as views.
fn fragments(shard: &Shard, kind: Kind, param: ParamId) -> Result<Fragments> {
    let mut fragments = Fragments::new(DType::F32, shard.device());
    for (slice, state) in shard
        .owned
        .iter()
        .zip(&shard.state)
        .filter(|(slice, _)| slice.param == param)
    {
        let values = match (kind, state) {
            (Kind::Master, _) => flat::view(&shard.masters[slice.block.index()], slice.in_shard())?,
            (Kind::Momentum, SliceState::InFull) => {
                flat::view(&shard.full_momentum[&param], slice.span)?
            }
            (Kind::Momentum, SliceState::Momentum(values))
            | (Kind::First, SliceState::Moments { first: values, .. })
            | (Kind::Second, SliceState::Moments { second: values, .. }) => values.clone(),
            _ => unreachable!("a slice has the state of its group"),
        };
        fragments.put(param, slice.span.start, values);
    }
    Ok(fragments)
}

/// Brings a window of a parameter to its writer, which alone gets values.
fn gather(
    channel: &mut Channel,
    plan: &Plan,
    param: ParamId,
    window: Span,
    writer: Rank,
    own: &Fragments,
    device: &Device,
) -> Result<Option<Vec<f32>>> {
    let rank = channel.rank();
    let parts: Vec<_> = (plan.layout().slices(param).iter())
        .filter_map(|slice| Some((slice.rank, slice.span.intersect(window)?)))
        .collect();
    // On a device, reading a view to the host would read all that it is a view of.
    let mut buffer = flat::zeros(window.len(), DType::F32, device)?;
    let mut ops = Vec::new();
    for (owner, part) in &parts {
        let span = Span::new(part.start - window.start, part.end - window.start);
        if *owner == rank {
            flat::write(&buffer, span.start, &own.read(param, *part)?)?;
        }
        match (*owner == rank, writer == rank) {
            (true, false) => ops.push(Op::Send { span, to: writer }),
            (false, true) => ops.push(Op::Recv { span, from: *owner }),
            _ => {}
        }
    }
    if parts.iter().any(|(owner, _)| *owner != writer) {
        buffer = channel
            .start(Request::new(Class::Exchange, buffer, ops))?
            .wait()?;
    }
    if writer == rank {
        Ok(Some(buffer.to_vec1()?))
    } else {
        Ok(None)
    }
}
