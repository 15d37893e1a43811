//! The file of a run's curve.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::curve::Curve;

/// More steps than any run has: the end of a curve that starts there is still a number.
const LATEST_START: usize = 1 << 40;

/// A curve, and what it is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) title: String,
    pub(crate) curve: Curve,
}

impl Saved {
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_string(self)?;
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(crate) fn read(path: &Path) -> Result<Self> {
        let json = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let saved = serde_json::from_slice(&json).ok();
        saved.filter(Self::can_be_drawn).with_context(|| {
            let path = path.display();
            format!("{path} is no curve of an earlier run, or one whose losses cannot be drawn")
        })
    }

    /// Whether it can come from a run: what cannot would end up in a picture that no program shows.
    fn can_be_drawn(&self) -> bool {
        let evaluations = self.curve.held_out.iter().map(|evaluation| evaluation.loss);
        let mut losses = self.curve.training.iter().copied().chain(evaluations);
        losses.all(|loss| (0.0..1e6).contains(&loss))
            && self.curve.start < LATEST_START
            && !self.title.contains(char::is_control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let json = r#"{"title":"Muon on 2 ranks","curve":{"start":7,"training":[5.5,2.25],"held_out":[{"step":2,"loss":2.5,"sequences":64}]}}"#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.json");
        fs::write(&path, json).unwrap();
        let saved = Saved::read(&path).unwrap();
        assert_eq!(saved.curve.training, [5.5, 2.25]);
        saved.write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), json);

        // Of a run before there were any that go on.
        fs::write(&path, json.replace("\"start\":7,", "")).unwrap();
        assert_eq!(Saved::read(&path).unwrap().curve.start, 0);

        for foreign in [
            "5.5,2.25",
            &json.replace("5.5", "1e308"),
            &json.replace("2.5", "-1"),
            &json.replace("\"start\":7", "\"start\":18446744073709551615"),
            &json.replace("Muon", "\\u0000"),
        ] {
            fs::write(&path, foreign).unwrap();
            let error = Saved::read(&path).unwrap_err().to_string();
            assert!(
                error.contains("loss.json is no curve of an earlier run"),
                "{error}"
            );
        }
    }
}
