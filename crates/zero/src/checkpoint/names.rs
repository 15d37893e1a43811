//! How the files of checkpoints are called.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use polarshard_partition::Rank;

/// The names of one checkpoint's tensor files: others than those of any that the folder has, also at the same step, so
/// that the checkpoint before is whole until the index is replaced.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub(super) number: u64,
    pub(super) step: u64,
}

impl Names {
    pub(super) fn of(self, rank: Rank) -> String {
        let Self { number, step } = self;
        format!("{number}-step-{step:08}-rank-{:05}.safetensors", rank.0)
    }
}

/// The tensor files in a folder, whole or not, by the numbers of their checkpoints; none if it cannot be read. A save
/// that was interrupted leaves some that no index names.
pub(super) fn numbered(folder: &Path) -> Vec<(u64, OsString)> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let files = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
    files
        .map(|entry| entry.file_name())
        .filter_map(|name| Some((number(name.to_str()?)?, name)))
        .collect()
}

/// More than anything is ever counted to, and exact in an f64.
pub(super) const MOST: u64 = 1 << 53;

/// Of a name as `Names` gives it, `.partial` or not.
fn number(name: &str) -> Option<u64> {
    let whole = name.strip_suffix(".partial").unwrap_or(name);
    let (number, rest) = whole.strip_suffix(".safetensors")?.split_once("-step-")?;
    let (step, rank) = rest.split_once("-rank-")?;
    let is_count = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = Some(number).filter(|text| is_count(text) && is_count(step) && is_count(rank));
    number?.parse().ok().filter(|number| *number < MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_names_have_numbers() {
        let name = Names {
            number: 12,
            step: 3,
        }
        .of(Rank(4));
        assert_eq!(name, "12-step-00000003-rank-00004.safetensors");
        assert_eq!(number(&name), Some(12));
        assert_eq!(number(&format!("{name}.partial")), Some(12));
        for other in [
            "index.json",
            "model.safetensors",
            "step-00000003-rank-00004.safetensors",
            "+1-step-00000003-rank-00004.safetensors",
            "1-step-3-rank-.safetensors",
            "1-step-best-rank-00004.safetensors",
            "1-step-00000003-rank-00004.safetensors.bak",
            "9007199254740992-step-00000003-rank-00004.safetensors",
            "99999999999999999999-step-00000003-rank-00004.safetensors",
        ] {
            assert_eq!(number(other), None, "{other}");
        }
    }
}
