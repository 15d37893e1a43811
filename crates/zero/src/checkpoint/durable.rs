//! Files that are whole or absent, whenever the machine stops.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Where a file is written until it is whole.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(".partial");
    name.into()
}

/// Syncs a written file, gives it its name, and syncs the folder.
pub(super) fn rename(file: &File, from: &Path, to: &Path) -> Result<()> {
    let failed = |error| Error::checkpoint(to, error);
    file.sync_all().map_err(failed)?;
    fs::rename(from, to).map_err(failed)?;
    if let Some(folder) = to.parent() {
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
    }
    Ok(())
}
