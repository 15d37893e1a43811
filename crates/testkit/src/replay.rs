//! Runs a golden case through the sharded optimizer, in the settings under which DeepSpeed is reproduced, and compares.

use candle_core::{DType, Device, Tensor};
use polarshard_comm::Communicator;
use polarshard_comm::ranks::Outcome;
use polarshard_muon::{Method, Precision, Rule, Rules};
use polarshard_partition::{Plan, UpdateGroup};
use polarshard_zero::{Config, Roles};

use crate::compare::{change, relative, values64};
use crate::devices::{moved, moved_gradients};
use crate::golden::{Case, Golden, Group};
use crate::harness::{on_ranks, train};

/// Why a replay did not come to an end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank failed.
    #[error("the sharded run failed")]
    Run(#[source] polarshard_zero::Error),
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// Weights cannot be read.
    #[error("weights cannot be read")]
    Tensor(#[from] candle_core::Error),
}

/// What came of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// The worst of the Muon parameters that are compared, if there are any.
    pub muon: Option<Worst>,
    /// The worst of AdamW's.
    pub adamw: Option<Worst>,
    /// Where the layout differs from DeepSpeed's, in words.
    pub layout: Vec<String>,
}

/// The change of a parameter in a step that is furthest off, measured by its tolerance.
#[derive(Debug, Clone, PartialEq)]
pub struct Worst {
    /// The parameter.
    pub name: String,
    /// The step, from 0.
    pub step: usize,
    /// The relative Frobenius error of its change.
    pub error: f64,
    /// What it may be.
    pub tolerance: f64,
}

impl Worst {
    /// The error in units of the tolerance.
    pub fn ratio(&self) -> f64 {
        self.error / self.tolerance
    }
}

impl Replay {
    /// Whether the layout is DeepSpeed's and everything is within its tolerance.
    pub fn is_faithful(&self) -> bool {
        let within = |worst: &Worst| worst.error <= worst.tolerance;
        self.layout.is_empty() && self.muon.iter().chain(&self.adamw).all(within)
    }
}

/// The settings of a case.
pub fn config(golden: &Golden) -> Config {
    let Case {
        stage,
        method,
        route,
        accumulate,
        overlap,
        bucket_size,
        weight_decay,
        muon_lr,
        adamw_lr,
        ..
    } = golden.case;
    let mut config = Config {
        stage,
        route,
        accumulate,
        overlap,
        bucket_size,
        ..Config::deepspeed()
    };
    let [muon, adamw] = &golden.groups;
    let rules = muon.names.iter().map(|name| (name, Rule::Muon));
    let rules = rules.chain(adamw.names.iter().map(|name| (name, Rule::AdamW)));
    config.rules = rules.fold(Rules::new(), |rules, (name, rule)| rules.with(name, rule));
    config.muon.newton_schulz.method = method;
    (config.muon.lr, config.muon.momentum, config.muon.nesterov) = (muon_lr, 0.95, true);
    (
        config.adamw.lr,
        config.adamw.beta1,
        config.adamw.beta2,
        config.adamw.eps,
    ) = (adamw_lr, 0.9, 0.95, 1e-10);
    (config.muon.weight_decay, config.adamw.weight_decay) = (weight_decay, weight_decay);
    config
}

/// Replays a case on one thread a rank, all on one device.
///
/// # Errors
/// [`Error`], if the run does not come to its end.
pub fn replay(golden: &Golden, device: &Device, iterate: Precision) -> Result<Replay, Error> {
    let mut replays = Vec::new();
    let rank = |comm| replay_rank(golden, comm, device, iterate);
    for (rank, outcome) in on_ranks(golden.case.world.get(), rank)
        .into_iter()
        .flatten()
        .enumerate()
    {
        match outcome {
            Outcome::Done(replay) => replays.push(replay),
            Outcome::Failed(error) => return Err(error),
            Outcome::Panicked(message) => return Err(Error::Panicked { rank, message }),
        }
    }
    // All ranks have the same weights: the run proved it.
    Ok(replays.swap_remove(0))
}

/// Replays a case as one rank of its world, with tensors on a device and Newton-Schulz iterations in a precision.
///
/// # Errors
/// [`Error`], if the run does not come to its end.
pub fn replay_rank(
    golden: &Golden,
    comm: impl Communicator + 'static,
    device: &Device,
    iterate: Precision,
) -> Result<Replay, Error> {
    let mut config = config(golden);
    config.muon.newton_schulz.iterate = iterate;
    let initial = moved(&golden.initial, DType::F32, device)?;
    let steps = golden
        .gradients
        .iter()
        .map(|step| moved_gradients(step, DType::F32, device))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let seen = train(comm, &initial, &Roles::default(), config, &steps).map_err(Error::Run)?;

    let changes = changes(golden, &seen.weights, iterate.on(device))?;
    let muon = golden.groups[0].names.len();
    let worst = |range: &dyn Fn(usize) -> bool| {
        let those = changes
            .iter()
            .filter(|(parameter, _)| range(*parameter))
            .map(|(_, worst)| worst.clone());
        those.max_by(|a, b| a.ratio().total_cmp(&b.ratio()))
    };
    Ok(Replay {
        muon: worst(&|parameter| parameter < muon),
        adamw: worst(&|parameter| parameter >= muon),
        layout: layout(golden, &seen.plan),
    })
}

/// Each step's change of each parameter that is compared, by the parameter's place in `order`.
fn changes(
    golden: &Golden,
    weights: &[Vec<Tensor>],
    iterated: DType,
) -> Result<Vec<(usize, Worst)>, Error> {
    let muon = golden.groups[0].names.len();
    let initial: Vec<_> = golden
        .initial
        .iter()
        .map(|(_, tensor)| tensor.clone())
        .collect();
    let (mut ours, mut theirs) = (&initial, &initial);
    let mut changes = Vec::new();
    for (step, (ours_after, theirs_after)) in weights.iter().zip(&golden.after).enumerate() {
        for (index, (name, tensor)) in golden.initial.iter().enumerate() {
            let group = if index < muon {
                UpdateGroup::Muon
            } else {
                UpdateGroup::AdamW
            };
            if let Some(tolerance) = tolerance(golden.case.method, iterated, group, tensor.dims()) {
                let ours = change(&values64(&ours[index])?, &values64(&ours_after[index])?);
                let theirs = change(&values64(&theirs[index])?, &values64(&theirs_after[index])?);
                let error = relative(&ours, &theirs);
                changes.push((
                    index,
                    Worst {
                        name: name.clone(),
                        step,
                        error,
                        tolerance,
                    },
                ));
            }
        }
        (ours, theirs) = (ours_after, theirs_after);
    }
    Ok(changes)
}

/// What a parameter's error may be where we iterate in this dtype, and DeepSpeed in fp16 (`Gram`) or bf16; `None` where
/// DeepSpeed's own update is wrong: that of a convolution by its compiled `Standard` path.
pub fn tolerance(
    method: Method,
    iterated: DType,
    group: UpdateGroup,
    shape: &[usize],
) -> Option<f64> {
    /// Under this side, and not a multiple of [`TILE`], fp16's own rounding is larger.
    const SMALL: usize = 72;
    const TILE: usize = 8;
    if group == UpdateGroup::AdamW {
        return Some(1e-4);
    }
    let ours = match iterated {
        DType::BF16 => 1e-1,
        DType::F16 => 2e-2,
        _ => 0.0,
    };
    if method != Method::Gram {
        return (shape.len() < 4).then_some(f64::max(ours, 6e-2));
    }
    let sides = match shape {
        [.., rows, cols] if shape.len() < 4 => [*rows, *cols],
        _ => [shape[0], shape[1..].iter().product()],
    };
    let is_odd = |side: usize| side < SMALL && !side.is_multiple_of(TILE);
    let theirs = if sides.into_iter().any(is_odd) {
        1.5e-2
    } else {
        1e-2
    };
    Some(f64::max(ours, theirs))
}

/// Where a plan's layout differs from the recorded one.
fn layout(golden: &Golden, plan: &Plan) -> Vec<String> {
    let mut differences = Vec::new();
    for (
        group,
        Group {
            names,
            owners,
            shard_len,
        },
    ) in [UpdateGroup::Muon, UpdateGroup::AdamW]
        .into_iter()
        .zip(&golden.groups)
    {
        let layout = plan.layout();
        let found = layout
            .blocks()
            .iter()
            .find(|block| layout.space(block.space).group == group);
        let found = found.map_or(0, |block| block.shard_len);
        if found != *shard_len && !names.is_empty() {
            differences.push(format!(
                "a shard of {group} has {found} elements, DeepSpeed's has {shard_len}"
            ));
        }
        for (name, owners) in names.iter().zip(owners) {
            let found: Vec<_> = plan
                .params()
                .id(name)
                .into_iter()
                .flat_map(|id| layout.owners(id).iter().collect::<Vec<_>>())
                .collect();
            let found: Vec<_> = found.into_iter().map(|rank| rank.0).collect();
            if found != *owners {
                differences.push(format!(
                    "`{name}` is owned by {found:?}, in DeepSpeed by {owners:?}"
                ));
            }
        }
    }
    differences
}
