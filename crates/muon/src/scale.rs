use std::fmt;
use std::str::FromStr;

use crate::Error;

/// How an orthogonalized matrix is scaled before the learning rate, by its (flattened) shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UpdateScale {
    /// `sqrt(max(1, rows / cols))`, by Keller Jordan.
    #[default]
    Original,
    /// `0.2 · sqrt(max(rows, cols))`: the root mean square of an update is that of AdamW
    /// (arXiv 2502.16982), so that one learning rate serves both.
    MatchRmsAdamW,
    /// `sqrt(rows / cols)`: the update has that spectral norm (arXiv 2310.17813).
    Spectral,
    /// 1.
    None,
}

impl UpdateScale {
    const NAMES: &str = "original, match-rms-adamw, spectral, none";

    /// The factor for a matrix of `rows` × `cols`, neither of them zero.
    #[must_use]
    pub fn factor(self, rows: usize, cols: usize) -> f64 {
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            Self::Original => (rows / cols).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(cols).sqrt(),
            Self::Spectral => (rows / cols).sqrt(),
            Self::None => 1.0,
        }
    }
}

impl fmt::Display for UpdateScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Original => "original",
            Self::MatchRmsAdamW => "match-rms-adamw",
            Self::Spectral => "spectral",
            Self::None => "none",
        })
    }
}

impl FromStr for UpdateScale {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "original" => Ok(Self::Original),
            "match-rms-adamw" => Ok(Self::MatchRmsAdamW),
            "spectral" => Ok(Self::Spectral),
            "none" => Ok(Self::None),
            _ => Err(Error::Unknown {
                what: "update scale",
                text: text.to_owned(),
                expected: Self::NAMES,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_follow_their_formulas() {
        let cases = [
            (UpdateScale::Original, 64, 16, 2.0),
            (UpdateScale::Original, 16, 64, 1.0),
            (UpdateScale::MatchRmsAdamW, 25, 100, 2.0),
            (UpdateScale::MatchRmsAdamW, 100, 25, 2.0),
            (UpdateScale::Spectral, 16, 64, 0.5),
            (UpdateScale::Spectral, 64, 16, 2.0),
            (UpdateScale::None, 3, 5, 1.0),
        ];
        for (scale, rows, cols, expected) in cases {
            assert_eq!(scale.factor(rows, cols), expected, "{scale} {rows}x{cols}");
        }
    }

    #[test]
    fn names_round_trip() {
        for name in UpdateScale::NAMES.split(", ") {
            assert_eq!(name.parse::<UpdateScale>().unwrap().to_string(), name);
        }
        let error = "Original".parse::<UpdateScale>().unwrap_err().to_string();
        assert!(
            error.contains("\"Original\"") && error.contains("match-rms-adamw"),
            "{error}"
        );
    }
}
