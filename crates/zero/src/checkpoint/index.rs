//! The file that makes a checkpoint: it is written last, and names all others.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::durable;
use crate::error::{Error, Result};

const NAME: &str = "index.json";
const FORMAT: u32 = 1;

/// What a checkpoint has, and in which files beside the index.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: u32,
    /// Steps applied.
    pub(super) step: u64,
    /// The file of each parameter's tensors.
    pub(super) files: BTreeMap<String, String>,
    /// How often each parameter's AdamW moments were updated.
    pub(super) adamw_steps: BTreeMap<String, u64>,
}

impl Index {
    pub(super) fn new(
        step: u64,
        files: BTreeMap<String, String>,
        adamw_steps: BTreeMap<String, u64>,
    ) -> Self {
        Self {
            format: FORMAT,
            step,
            files,
            adamw_steps,
        }
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let text = fs::read(&path).map_err(|error| Error::checkpoint(&path, error))?;
        let index: Self =
            serde_json::from_slice(&text).map_err(|error| Error::checkpoint(&path, error))?;
        if index.format != FORMAT {
            let reason = format!("format {} is not {FORMAT}", index.format);
            return Err(Error::checkpoint(&path, std::io::Error::other(reason)));
        }
        Ok(index)
    }

    /// Replaces the folder's index, then removes the tensor files that only the one before it named.
    pub(super) fn replace(&self, folder: &Path) -> Result<()> {
        let before = Self::read(folder).ok();
        let path = folder.join(NAME);
        let beside = durable::beside(&path);
        let failed = |error: std::io::Error| Error::checkpoint(&beside, error);
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| Error::checkpoint(&path, error))?;
        let mut file = File::create(&beside).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        durable::rename(&file, &beside, &path)?;
        for file in before
            .iter()
            .flat_map(Self::tensor_files)
            .filter(|file| !self.tensor_files().contains(*file))
        {
            // The new checkpoint is whole: a file that stays behind costs room and nothing else.
            let _ = fs::remove_file(folder.join(file));
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
