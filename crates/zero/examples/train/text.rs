//! What is read: bytes of text, and the batches cut out of them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use polarshard_partition::{Digest, DigestWriter, Rank};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::options::Options;

/// Held-out sequences at most: enough for two digits of the loss, and evaluated in a step's time.
const HELD_OUT: usize = 64;

/// A text, its last tenth held out.
pub(crate) struct Text {
    training: Vec<u8>,
    held_out: Vec<u8>,
    context: usize,
    batch: usize,
    seed: u64,
}

/// Inputs and targets, both `(batch, context)`: each target is the byte after its input.
pub(crate) struct Batch {
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
}

impl Text {
    /// Reads the text that the options name.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let mut training = match &options.text {
            Some(path) => {
                fs::read(path).with_context(|| format!("cannot read {}", path.display()))?
            }
            None => repository()?,
        };
        let held_out = training.split_off(training.len() - training.len() / 10);
        let needed = options.context.get().saturating_add(1);
        ensure!(
            held_out.len() >= needed,
            "the held-out tenth of the text has {} bytes and a sequence {needed}: give a longer text or a shorter \
             --context",
            held_out.len()
        );
        Ok(Self {
            training,
            held_out,
            context: needed - 1,
            batch: options.batch.get(),
            seed: options.seed,
        })
    }

    /// Bytes trained on.
    pub(crate) fn training_len(&self) -> usize {
        self.training.len()
    }

    /// Bytes held out.
    pub(crate) fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    /// A digest of all of it.
    pub(crate) fn digest(&self) -> Digest {
        DigestWriter::new()
            .bytes(&self.training)
            .bytes(&self.held_out)
            .finish()
    }

    /// The micro-batch of a rank, drawn from the seed and its number, so that it can be drawn again.
    pub(crate) fn batch(
        &self,
        step: usize,
        micro: usize,
        rank: Rank,
        device: &Device,
    ) -> Result<Batch> {
        let digest = DigestWriter::new()
            .u64(self.seed)
            .u64(step as u64)
            .u64(micro as u64)
            .u64(rank.0 as u64)
            .finish();
        let mut rng = ChaCha8Rng::seed_from_u64(digest.0);
        let starts = 0..self.training.len() - self.context;
        let starts: Vec<_> = (0..self.batch)
            .map(|_| rng.random_range(starts.clone()))
            .collect();
        Batch::new(&self.training, &starts, self.context, device)
    }

    /// This rank's part of the held-out sequences, which are spread over the held-out text; `None` if there are fewer
    /// sequences than ranks.
    pub(crate) fn held_out(
        &self,
        rank: Rank,
        world: usize,
        device: &Device,
    ) -> Result<Option<Batch>> {
        let room = self.held_out.len() - self.context;
        let count = HELD_OUT.min(room.div_ceil(self.context));
        let starts: Vec<_> = (rank.0..count)
            .step_by(world)
            .map(|index| index * room / count)
            .collect();
        if starts.is_empty() {
            Ok(None)
        } else {
            Batch::new(&self.held_out, &starts, self.context, device).map(Some)
        }
    }
}

impl Batch {
    fn new(text: &[u8], starts: &[usize], context: usize, device: &Device) -> Result<Self> {
        let at = |shift| {
            let bytes = starts
                .iter()
                .flat_map(|start| &text[start + shift..][..context]);
            let ids = bytes.map(|byte| u32::from(*byte)).collect();
            Tensor::from_vec(ids, (starts.len(), context), device)
        };
        Ok(Self {
            inputs: at(0)?,
            targets: at(1)?,
        })
    }

    /// Several batches as one.
    pub(crate) fn join(batches: &[Self]) -> Result<Self> {
        let join = |part: fn(&Self) -> &Tensor| {
            Tensor::cat(&batches.iter().map(part).collect::<Vec<_>>(), 0)
        };
        Ok(Self {
            inputs: join(|batch| &batch.inputs)?,
            targets: join(|batch| &batch.targets)?,
        })
    }

    /// How many sequences.
    pub(crate) fn len(&self) -> usize {
        self.inputs.dims()[0]
    }
}

/// The sources and documents of this repository, by path.
fn repository() -> Result<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    collect(&root, &mut files)?;
    files.sort();
    let mut text = Vec::new();
    for file in files {
        text.extend(fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    Ok(text)
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in entries {
        let entry = entry?;
        // Of the entry itself: a link may lead back, or out of the repository.
        let kind = entry.file_type()?;
        let (path, name) = (
            entry.path(),
            entry.file_name().to_string_lossy().into_owned(),
        );
        // Outputs and test vectors are no text.
        if kind.is_dir() {
            if !name.starts_with('.') && !["target", "golden"].contains(&name.as_str()) {
                collect(&path, files)?;
            }
        } else if kind.is_file()
            && ["rs", "md", "toml"]
                .iter()
                .any(|ending| path.extension().is_some_and(|found| found == *ending))
        {
            files.push(path);
        }
    }
    Ok(())
}
