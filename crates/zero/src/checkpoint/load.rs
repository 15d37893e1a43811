//! How a checkpoint is read: each rank reads its own slices of every tensor.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Tensor;
use polarshard_partition::{ParamId, Span};

use super::index::Index;
use super::tensor_file::TensorFileReader;
use super::{Kind, all_come, together};
use crate::channel::{Channel, differing, exact};
use crate::error::{Error, Result};
use crate::flat;
use crate::step::{Shard, SliceState};

/// What a rank has read: nothing of it is in use yet.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Steps applied.
    pub(crate) step: u64,
    index_digest: u64,
    adamw_steps: Vec<u64>,
    /// Where values go, and the values.
    values: Vec<(Tensor, Tensor)>,
}

/// Reads this rank's slices. All ranks call it; nothing has changed until the result is [put in](Loaded::put_in).
pub(crate) fn load(channel: &mut Channel, shard: &Shard, folder: &Path) -> Result<Loaded> {
    let _paused = all_come(channel)?;
    let loaded = read(shard, folder);
    let (loaded, ended) = match loaded {
        Ok(loaded) => (Some(loaded), Ok(())),
        Err(error) => (None, Err(error)),
    };
    together(channel, ended)?;
    let loaded = loaded.expect("an error of this rank was returned");
    let rank = channel.rank();
    let digests = channel.collect(&[exact(loaded.index_digest)])?;
    let differing = differing(&digests, 0, rank);
    if !differing.is_empty() {
        return Err(Error::OtherCheckpoint {
            rank,
            differing,
            folder: folder.to_path_buf(),
        });
    }
    Ok(loaded)
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
        let mut others = Kind::of_other(param.group()).iter();
        if !file.has(&key) && others.any(|kind| file.has(&kind.key(&param.name))) {
            return Err(Error::CheckpointGroup {
                name: param.name.clone(),
                model: param.group(),
            });
        }
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
        index_digest: index.digest(),
        adamw_steps: adamw_steps.collect(),
        values,
    })
}
