//! Checkpoints that fit any world: whole tensors by parameter name, however the run was sharded.
//!
//! A parameter's tensors are put together, window by window, on the rank that owns most of it, which writes them to its
//! file: `master/NAME`, and `momentum/NAME` or `first/NAME` and `second/NAME`, all in fp32. The index is written last.

mod durable;
mod index;
mod tensor_file;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Tensor};
use polarshard_comm::{Op, Request};
use polarshard_partition::{Class, ParamId, Plan, Rank, Span, UpdateGroup};

use self::index::Index;
use self::tensor_file::{TensorFileReader, TensorFileWriter};
use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::flat;
use crate::step::{Fragments, Shard, SliceState};

/// A tensor that is kept for each parameter of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Master,
    Momentum,
    First,
    Second,
}

impl Kind {
    fn of(group: UpdateGroup) -> &'static [Self] {
        match group {
            UpdateGroup::Muon => &[Self::Master, Self::Momentum],
            UpdateGroup::AdamW => &[Self::Master, Self::First, Self::Second],
        }
    }

    fn key(self, name: &str) -> String {
        let kind = match self {
            Self::Master => "master",
            Self::Momentum => "momentum",
            Self::First => "first",
            Self::Second => "second",
        };
        format!("{kind}/{name}")
    }
}

/// Writes the state after `step` steps to a folder. All ranks call it with the same folder.
pub(crate) fn save(channel: &mut Channel, shard: &Shard, step: u64, folder: &Path) -> Result<()> {
    let _paused = channel.comm().pause();
    let rank = channel.rank();
    // Rank 0 alone says how files are called: another rank may see an older state of the folder.
    let number = channel.collect(&[Index::next_number(folder) as f64])?[0][0] as u64;
    let names = Names { number, step };
    let writer = begin(shard.plan(), rank, names, folder);
    let written = match writer {
        Ok(writer) => write_all(channel, shard, writer),
        // The other ranks wait for this one's slices.
        Err(error) => write_all(channel, shard, None).and(Err(error)),
    };
    together(channel, written).inspect_err(|error| {
        // No index will name it; but after a fatal error others may have gone on to the index.
        if !error.is_fatal() {
            let _ = fs::remove_file(folder.join(names.of(rank)));
        }
    })?;
    let replaced = if rank == Rank(0) {
        index(shard, names).replace(folder)
    } else {
        Ok(())
    };
    together(channel, replaced)
}

/// What a rank reads of a checkpoint: its own slices.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Steps applied.
    pub(crate) step: u64,
    adamw_steps: Vec<u64>,
    /// Where values go, and the values.
    values: Vec<(Tensor, Tensor)>,
}

/// Reads this rank's slices. All ranks call it; nothing has changed until the result is [put in](Loaded::put_in).
pub(crate) fn load(channel: &mut Channel, shard: &Shard, folder: &Path) -> Result<Loaded> {
    let _paused = channel.comm().pause();
    let loaded = read(shard, folder);
    let (loaded, ended) = match loaded {
        Ok(loaded) => (Some(loaded), Ok(())),
        Err(error) => (None, Err(error)),
    };
    together(channel, ended)?;
    Ok(loaded.expect("an error of this rank was returned"))
}

impl Loaded {
    pub(crate) fn put_in(self, shard: &mut Shard) -> Result<()> {
        for (target, values) in &self.values {
            flat::write(target, 0, values)?;
        }
        shard.adamw_steps = self.adamw_steps;
        Ok(())
    }
}

/// Fails on all ranks if it failed on one.
fn together(channel: &mut Channel, result: Result<()>) -> Result<()> {
    if let Err(error) = &result
        && error.is_fatal()
    {
        return result;
    }
    let failed = channel.collect(&[f64::from(u8::from(result.is_err()))])?;
    result?;
    let ranks: Vec<_> = (0..failed.len())
        .filter(|rank| failed[*rank][0] != 0.0)
        .map(Rank)
        .collect();
    if ranks.is_empty() {
        Ok(())
    } else {
        Err(Error::CheckpointFailed {
            rank: channel.rank(),
            failed: ranks,
        })
    }
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

/// How the files of one checkpoint are called: otherwise than those of the one before it, also at the same step, so that
/// that one is whole until the index is replaced.
#[derive(Debug, Clone, Copy)]
struct Names {
    number: u64,
    step: u64,
}

impl Names {
    fn of(self, rank: Rank) -> String {
        let Self { number, step } = self;
        format!("{number}-step-{step:08}-rank-{:05}.safetensors", rank.0)
    }
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
                    written = file.append(&values);
                }
            }
        }
    }
    written?;
    file.map_or(Ok(()), TensorFileWriter::finish)
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
    device: &candle_core::Device,
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

fn read(shard: &Shard, folder: &Path) -> Result<Loaded> {
    let params = shard.plan().params();
    let index = Index::read(folder)?;
    if let Some(name) = index.files.keys().find(|name| params.id(name).is_none()) {
        return Err(Error::NotInModel {
            name: name.clone(),
            folder: folder.to_path_buf(),
        });
    }
    let mut files = BTreeMap::new();
    let mut values = Vec::new();
    let mut take = |param: ParamId, kind: Kind, span: Span, target: Tensor| -> Result<()> {
        let param = params.get(param);
        let path = index.path(folder, &param.name)?;
        let key = kind.key(&param.name);
        if !files.contains_key(&path) {
            files.insert(path.clone(), TensorFileReader::open(&path)?);
        }
        let file = files.get_mut(&path).expect("it was just opened");
        if file.shape(&key)? != param.shape.as_slice() {
            return Err(Error::CheckpointShape {
                name: param.name.clone(),
                model: param.shape.to_vec(),
                checkpoint: file.shape(&key)?.to_vec(),
            });
        }
        let read = Tensor::from_vec(file.read(&key, span)?, span.len(), target.device())?;
        values.push((target, read));
        Ok(())
    };
    for (slice, state) in shard.owned.iter().zip(&shard.state) {
        let master = flat::view(&shard.masters[slice.block.index()], slice.in_shard())?;
        take(slice.param, Kind::Master, slice.span, master)?;
        match state {
            SliceState::Momentum(momentum) => {
                take(slice.param, Kind::Momentum, slice.span, momentum.clone())?;
            }
            SliceState::InFull => {}
            SliceState::Moments { first, second } => {
                take(slice.param, Kind::First, slice.span, first.clone())?;
                take(slice.param, Kind::Second, slice.span, second.clone())?;
            }
        }
    }
    for (param, momentum) in &shard.full_momentum {
        take(
            *param,
            Kind::Momentum,
            Span::of_len(0, momentum.elem_count()),
            momentum.clone(),
        )?;
    }
    // An empty parameter may have none, and needs none.
    let adamw_steps = params.iter().map(|(_, param)| {
        index
            .adamw_steps
            .get(&param.name)
            .copied()
            .unwrap_or_default()
    });
    Ok(Loaded {
        step: index.step,
        adamw_steps: adamw_steps.collect(),
        values,
    })
}
