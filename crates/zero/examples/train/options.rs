//! The command line.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use polarshard_muon::{Method, Rule, Rules};
use polarshard_partition::{Digest, DigestWriter, Placement, Policy, Route, Stage, WorldSize};
use polarshard_zero::Config;

use crate::text::Text;

/// Trains a byte-level transformer on several ranks with sharded Muon and AdamW.
#[derive(Debug, Clone, Parser)]
#[command(name = "train")]
pub(crate) struct Options {
    /// Ranks: 4, unless --spawn or a launcher says otherwise.
    #[arg(long)]
    pub(crate) world: Option<NonZeroUsize>,
    /// Where it trains. On the CPU the ranks are threads of this process; with CUDA each is a process with a GPU, started
    /// by --spawn, torchrun, srun or mpirun.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) device: DeviceKind,
    /// Start this many processes on this machine, each a rank, and wait for them.
    #[arg(long)]
    pub(crate) spawn: Option<NonZeroUsize>,
    /// What is sharded: 1, optimizer state; 2, gradients too.
    #[arg(long, default_value_t)]
    pub(crate) stage: Stage,
    /// Where parameters lie: striped, each bucket cut evenly; whole, whole matrices to ranks as far as the balance allows;
    /// flat, in DeepSpeed's order.
    #[arg(long, default_value_t)]
    pub(crate) placement: Placement,
    /// How gradients are reduced: reduce-scatter; or as DeepSpeed can, all-reduce, bucket-all-reduce, reduce-to-owner.
    #[arg(long, default_value_t)]
    pub(crate) route: Route,
    /// How split matrices get whole: assign-owner, one rank orthogonalizes; exchange-update, each owner does;
    /// copy-to-owners, so too, and keeps whole momentum, as DeepSpeed.
    #[arg(long, default_value_t)]
    pub(crate) policy: Policy,
    /// Which Newton-Schulz products are used: auto, standard or gram.
    #[arg(long, default_value_t)]
    pub(crate) method: Method,
    /// What trains the hidden matrices. Everything else is AdamW's in any case.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) optimizer: Hidden,
    /// Steps.
    #[arg(long, default_value = "120")]
    pub(crate) steps: NonZeroUsize,
    /// Stop after this step, as if the rest of --steps came: with --save, to go on later with the same --steps.
    #[arg(long)]
    pub(crate) stop: Option<NonZeroUsize>,
    /// Save a checkpoint in this folder after the last step, instead of one that is there. All ranks must see it.
    #[arg(long)]
    pub(crate) save: Option<PathBuf>,
    /// With --save: save it after every so many steps, too; 0, after the last one only.
    #[arg(long, requires = "save", default_value_t = 0)]
    pub(crate) save_every: usize,
    /// Go on from the checkpoint in this folder, with any number of ranks; not with --compare. It holds weights and the
    /// optimizer's state: the other options are to be given again.
    #[arg(long, conflicts_with = "compare")]
    pub(crate) resume: Option<PathBuf>,
    /// Micro-batches a step, on each rank.
    #[arg(long, default_value = "2")]
    pub(crate) accumulate: NonZeroUsize,
    /// The size at which a bucket closes, in elements.
    #[arg(long, default_value = "200000")]
    pub(crate) bucket_size: NonZeroUsize,
    /// Reduce buckets while the backward pass goes on (the default).
    #[arg(long, overrides_with = "no_overlap")]
    overlap: bool,
    /// Let the backward pass wait for each bucket's reduction.
    #[arg(long, overrides_with = "overlap")]
    no_overlap: bool,
    /// The greatest norm of the mean gradient; a greater one is scaled down to it.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) clip: Option<f64>,
    /// The highest learning rate of Muon; a short warm-up leads to it, and a cosine from it.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.02)]
    pub(crate) lr: f64,
    /// The highest learning rate of AdamW, on the same schedule.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.004)]
    pub(crate) adamw_lr: f64,
    /// Decoupled weight decay of the hidden matrices; with --optimizer adamw of all weights.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.0)]
    pub(crate) weight_decay: f64,
    /// Sequences in a micro-batch.
    #[arg(long, default_value = "4")]
    pub(crate) batch: NonZeroUsize,
    /// Bytes that the model sees.
    #[arg(long, default_value = "96")]
    pub(crate) context: NonZeroUsize,
    /// Transformer layers.
    #[arg(long, default_value = "4")]
    pub(crate) layers: NonZeroUsize,
    /// Features of a position.
    #[arg(long, default_value = "128")]
    pub(crate) width: NonZeroUsize,
    /// Attention heads.
    #[arg(long, default_value = "4")]
    pub(crate) heads: NonZeroUsize,
    /// Seed of weights and batches.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// The text, of which the last tenth is held out. By default the sources and documents of this repository.
    #[arg(long)]
    pub(crate) text: Option<PathBuf>,
    /// Where the pictures and the curve go.
    #[arg(long, default_value = "target/train")]
    pub(crate) out: PathBuf,
    /// Train the same model unsharded, too, on the same batches and the device of rank 0, and compare the weights; not with
    /// --beside.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Prove that all ranks have the same weights after every so many steps; 0, after the last one only.
    #[arg(long, default_value_t = 0)]
    pub(crate) verify_every: usize,
    /// Draw the curve of an earlier run, its loss.json, beside this one's; not with --compare.
    #[arg(long, conflicts_with = "compare")]
    pub(crate) beside: Option<PathBuf>,
}

/// Where it trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum DeviceKind {
    /// The CPU.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// What trains the hidden matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Hidden {
    /// Muon.
    #[default]
    Muon,
    /// AdamW.
    Adamw,
}

impl Options {
    /// The options given, checked as far as they speak of each other.
    pub(crate) fn parsed() -> Result<Self> {
        let options = Self::parse();
        options.check()?;
        Ok(options)
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.device == DeviceKind::Cpu || cfg!(feature = "nccl"),
            "--device cuda needs CUDA and NCCL: build `train` with `--features nccl`"
        );
        let (width, heads) = (self.width, self.heads);
        ensure!(
            width.get() % heads.get() == 0 && (width.get() / heads.get()).is_multiple_of(2),
            "--width {width} must be a multiple of 2 x --heads {heads}: a head's features are rotated in pairs"
        );
        if let Some(stop) = self.stop {
            let steps = self.steps;
            ensure!(
                stop <= steps,
                "--stop {stop} comes after the last of --steps {steps}"
            );
        }
        self.check_rates()?;
        self.check_sizes()
    }

    fn check_rates(&self) -> Result<()> {
        let lr = self.lr;
        ensure!(
            lr.is_finite() && lr > 0.0,
            "--lr {lr} must be a number above 0"
        );
        for (option, value) in [
            ("--adamw-lr", self.adamw_lr),
            ("--weight-decay", self.weight_decay),
        ] {
            let is_usable = value.is_finite() && value >= 0.0;
            ensure!(is_usable, "{option} {value} must be a number from 0 on");
        }
        if let Some(clip) = self.clip {
            let is_usable = clip.is_finite() && clip > 0.0;
            ensure!(is_usable, "--clip {clip} must be a number above 0");
        }
        Ok(())
    }

    /// Refuses what no machine can hold: an allocation that fails ends the process without a word about the option.
    fn check_sizes(&self) -> Result<()> {
        const MOST: u128 = 1 << 36;
        const MOST_RANKS: usize = 1 << 12;
        for (option, ranks) in [("--world", self.world), ("--spawn", self.spawn)] {
            let ranks = ranks.map_or(0, NonZeroUsize::get);
            ensure!(
                ranks <= MOST_RANKS,
                "{option} {ranks} is more than the {MOST_RANKS} ranks that one machine can be asked for"
            );
        }
        let [batch, context, width, heads, layers] = [
            self.batch,
            self.context,
            self.width,
            self.heads,
            self.layers,
        ]
        .map(|option| option.get() as u128);
        let weights = (12 * width).saturating_mul(width).saturating_mul(layers);
        ensure!(
            weights <= MOST,
            "--layers {layers} of --width {width} have {weights} weights, more than fit anywhere"
        );
        // The widest of the hidden layer, the logits and the attention's weights.
        let widest = (4 * width).max(256).max(heads * context);
        let values = widest.saturating_mul(context).saturating_mul(batch);
        ensure!(
            values <= MOST,
            "--batch {batch} sequences of --context {context} bytes make a tensor of {values} values, more than fit \
             anywhere"
        );
        Ok(())
    }

    /// What all ranks must have alike: the text, and every option but those for rank 0 alone.
    pub(crate) fn digest(&self, text: &Text) -> Digest {
        let alike = Self {
            text: None,
            out: PathBuf::new(),
            compare: false,
            beside: None,
            ..self.clone()
        };
        DigestWriter::new()
            .str(&format!("{alike:?}"))
            .u64(text.digest().0)
            .finish()
    }

    /// The steps done when training ends.
    pub(crate) fn end(&self) -> usize {
        self.stop.unwrap_or(self.steps).get()
    }

    /// Whether the replicas are compared when so many steps are done.
    pub(crate) fn verifies_after(&self, done: usize) -> bool {
        is_due(self.verify_every, done)
    }

    /// Where a checkpoint goes when so many steps are done, if one is due.
    pub(crate) fn saves_after(&self, done: usize) -> Option<&Path> {
        let due = done == self.end() || is_due(self.save_every, done);
        self.save.as_deref().filter(|_| due)
    }

    /// What trains where, in words.
    pub(crate) fn title(&self, world: WorldSize) -> String {
        let ranks = match self.device {
            DeviceKind::Cpu => "ranks",
            DeviceKind::Cuda => "CUDA ranks",
        };
        format!("{} on {world} {ranks}", self.optimizers())
    }

    /// What trains, in words.
    fn optimizers(&self) -> &'static str {
        match self.optimizer {
            Hidden::Muon => "Muon and AdamW",
            Hidden::Adamw => "AdamW",
        }
    }

    /// Which parameters are Muon's. Q, K and V are one weight and three matrices.
    pub(crate) fn rules(&self) -> Rules {
        match self.optimizer {
            Hidden::Muon => {
                Rules::new().with("*.qkv.weight", Rule::SplitRows(vec![self.width.get(); 3]))
            }
            Hidden::Adamw => Rules::new().with("*", Rule::AdamW),
        }
    }

    /// The settings of the sharded optimizer.
    pub(crate) fn config(&self) -> Config {
        let mut config = Config {
            stage: self.stage,
            placement: self.placement,
            route: self.route,
            policy: self.policy,
            bucket_size: self.bucket_size,
            accumulate: self.accumulate,
            overlap: !self.no_overlap,
            clip: self.clip,
            rules: self.rules(),
            ..Config::default()
        };
        config.muon.lr = self.lr;
        config.muon.weight_decay = self.weight_decay;
        config.muon.newton_schulz.method = self.method;
        config.adamw.lr = self.adamw_lr;
        if self.optimizer == Hidden::Adamw {
            config.adamw.weight_decay = self.weight_decay;
        }
        config
    }

    /// Muon's learning rate in a step, counted from 0: up in a line over a tenth of the steps, down to a twentieth in a
    /// cosine.
    pub(crate) fn learning_rate(&self, step: usize) -> f64 {
        const LOWEST: f64 = 0.05;
        let warm_up = self.steps.get().div_ceil(10);
        let rest = (self.steps.get() - warm_up).max(1);
        let factor = if step < warm_up {
            (step + 1) as f64 / warm_up as f64
        } else {
            let done = (step - warm_up) as f64 / rest as f64;
            LOWEST + (1.0 - LOWEST) * (1.0 + (std::f64::consts::PI * done).cos()) / 2.0
        };
        self.lr * factor
    }
}

/// Whether something happens after so many steps that happens after every so many; never for 0.
fn is_due(every: usize, done: usize) -> bool {
    every > 0 && done.is_multiple_of(every)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_exclude_or_need_each_other_are_named() {
        for (given, named) in [
            ("train --resume there --compare", "--compare"),
            ("train --save-every 5", "--save"),
        ] {
            let error = Options::try_parse_from(given.split(' ')).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn the_option_that_cannot_be_is_named() {
        for (option, value) in [
            ("--batch", "18446744073709551615"),
            ("--context", "18446744073709551615"),
            ("--layers", "18446744073709551615"),
            ("--width", "18446744073709551608"),
            ("--heads", "9223372036854775808"),
            ("--lr", "NaN"),
            ("--lr", "0"),
            ("--stop", "121"),
            ("--adamw-lr", "-1"),
            ("--weight-decay", "inf"),
            ("--clip", "0"),
            #[cfg(not(feature = "nccl"))]
            ("--device", "cuda"),
        ] {
            let options = Options::try_parse_from(["train", option, value]).unwrap();
            let error = options.check().unwrap_err().to_string();
            assert!(error.contains(&format!("{option} {value}")), "{error}");
        }
    }
}
