//! The file that makes a checkpoint: it is written last, and names all others.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use polarshard_partition::DigestWriter;
use serde::{Deserialize, Serialize};

use super::durable;
use super::names::{MOST, numbered};
use crate::error::{Error, Result};

const NAME: &str = "index.json";
const FORMAT: u32 = 1;
/// What a checkpoint has, and in which files beside the index.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: u32,
    /// Above that of any checkpoint or file that the folder had.
    pub(super) number: u64,
    /// Steps applied.
    pub(super) step: u64,
    /// Nanoseconds since 1970: it tells checkpoints of two runs apart whose index is the same otherwise, while copies of
    /// one are the same. Checkpoints that were written before it was kept have none.
    #[serde(default)]
    saved_at: u64,
    /// The file of each parameter's tensors.
    pub(super) files: BTreeMap<String, String>,
    /// How often each parameter's AdamW moments were updated.
    pub(super) adamw_steps: BTreeMap<String, u64>,
}

impl Index {
    pub(super) fn new(
        number: u64,
        step: u64,
        files: BTreeMap<String, String>,
        adamw_steps: BTreeMap<String, u64>,
    ) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            format: FORMAT,
            number,
            step,
            saved_at: now.map_or(0, |since| since.as_nanos() as u64),
            files,
            adamw_steps,
        }
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let text = fs::read(&path).map_err(|error| Error::checkpoint(&path, error))?;
        let index: Self =
            serde_json::from_slice(&text).map_err(|error| Error::checkpoint(&path, error))?;
        match index.fault() {
            Some(reason) => Err(Error::checkpoint(&path, std::io::Error::other(reason))),
            None => Ok(index),
        }
    }

    /// What ranks compare to find out whether they have read the same one.
    pub(super) fn digest(&self) -> u64 {
        let text = serde_json::to_vec(self).expect("numbers and maps of text are JSON");
        DigestWriter::new().bytes(&text).finish().0
    }

    /// Fails if a file that it names is not in the folder, by name: a rank was given another one.
    pub(super) fn check_files(&self, folder: &Path) -> Result<()> {
        for file in self.tensor_files() {
            let path = folder.join(file);
            fs::metadata(&path).map_err(|error| {
                let reason = match error.kind() {
                    ErrorKind::NotFound => std::io::Error::other(
                        "a rank has written this file, but not where rank 0 looks for it: all must be given one folder, and \
                         no other run the same",
                    ),
                    _ => error,
                };
                Error::checkpoint(&path, reason)
            })?;
        }
        Ok(())
    }

    /// The number of the next checkpoint in a folder: above those of all that it has, or has files of.
    pub(super) fn next_number(folder: &Path) -> u64 {
        let of_files = numbered(folder).into_iter().map(|(number, _)| number);
        let of_index = Self::read(folder).ok().map(|before| before.number);
        of_files
            .chain(of_index)
            .max()
            .map_or(0, |number| number.saturating_add(1))
    }

    /// What is wrong with what was read.
    fn fault(&self) -> Option<String> {
        let Self {
            format,
            number,
            step,
            saved_at: _,
            files,
            adamw_steps,
        } = self;
        if *format != FORMAT {
            return Some(format!("format {format} is not {FORMAT}"));
        }
        if let Some(count) = [number, step].into_iter().find(|count| **count >= MOST) {
            return Some(format!("{count} is no count of checkpoints or steps"));
        }
        if let Some((name, steps)) = adamw_steps.iter().find(|(_, steps)| *steps > step) {
            return Some(format!(
                "`{name}` was updated {steps} times in {step} steps"
            ));
        }
        if let Some(name) = files.keys().find(|name| !adamw_steps.contains_key(*name)) {
            return Some(format!("`adamw_steps` has no `{name}`"));
        }
        // Nothing outside the folder must be read, nor the index.
        let outside = files.iter().find(|(_, file)| !is_of_tensors(file));
        outside
            .map(|(name, file)| format!("`{file}`, of `{name}`, is no tensor file in this folder"))
    }

    /// Replaces the folder's index, then removes the tensor files of earlier checkpoints, and those that an interrupted save
    /// left.
    pub(super) fn replace(&self, folder: &Path) -> Result<()> {
        let path = folder.join(NAME);
        let beside = durable::beside(&path);
        let failed = |error: std::io::Error| Error::checkpoint(&beside, error);
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| Error::checkpoint(&path, error))?;
        let mut file = File::create(&beside).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        // Another run's, which has removed the files that this one names.
        if let Some(other) = Self::read(folder)
            .ok()
            .filter(|other| other.number >= self.number)
        {
            let reason = format!(
                "checkpoint {} is there, made while {} was",
                other.number, self.number
            );
            return Err(Error::checkpoint(&path, std::io::Error::other(reason)));
        }
        durable::rename(&file, &beside, &path)?;
        for (number, file) in numbered(folder) {
            if number < self.number {
                // The new checkpoint is whole: a file that stays behind costs room and nothing else.
                let _ = fs::remove_file(folder.join(file));
            }
        }
        Ok(())
    }

    /// The path of a parameter's file.
    pub(super) fn path(&self, folder: &Path, name: &str) -> Result<PathBuf> {
        match self.files.get(name) {
            Some(file) => Ok(folder.join(file)),
            None => Err(Error::NotInCheckpoint {
                name: name.to_string(),
                folder: folder.to_path_buf(),
            }),
        }
    }

    fn tensor_files(&self) -> std::collections::BTreeSet<&String> {
        self.files.values().collect()
    }
}

fn is_of_tensors(file: &str) -> bool {
    let mut components = Path::new(file).components();
    let first = components.next();
    let is_in_folder = matches!(first, Some(Component::Normal(name)) if name == file);
    is_in_folder && components.next().is_none() && file != NAME
}
