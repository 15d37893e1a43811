use crate::{Error, NewtonSchulz, UpdateScale};

/// Hyper-parameters of the Muon group.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonConfig {
    /// Learning rate, in units of the scaled orthogonal update.
    pub lr: f64,
    /// β of the momentum `M ← βM + (1-β)G`, in [0, 1).
    pub momentum: f64,
    /// Whether `βM + (1-β)G` is orthogonalized, in place of M.
    pub nesterov: bool,
    /// Decoupled weight decay: weights shrink by `1 - lr · weight_decay` a step.
    pub weight_decay: f64,
    /// How matrices are orthogonalized.
    pub newton_schulz: NewtonSchulz,
    /// How updates are scaled by shape.
    pub scale: UpdateScale,
}

impl Default for MuonConfig {
    /// lr 0.02, momentum 0.95 with nesterov, no decay, five Keller Jordan steps, original scale.
    fn default() -> Self {
        Self {
            lr: 0.02,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            newton_schulz: NewtonSchulz::default(),
            scale: UpdateScale::default(),
        }
    }
}

impl MuonConfig {
    /// Whether every field is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that is not, and its value.
    pub fn validate(&self) -> Result<(), Error> {
        non_negative("muon.lr", self.lr)?;
        below_one("muon.momentum", self.momentum)?;
        non_negative("muon.weight_decay", self.weight_decay)?;
        shrinking("muon.lr * muon.weight_decay", self.lr * self.weight_decay)?;
        self.newton_schulz.check_steps("muon.newton_schulz.steps")
    }
}

/// Hyper-parameters of the AdamW group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate.
    pub lr: f64,
    /// β of the first moment, in [0, 1).
    pub beta1: f64,
    /// β of the second moment, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment; must be positive.
    pub eps: f64,
    /// Decoupled weight decay: weights shrink by `1 - lr · weight_decay` a step.
    pub weight_decay: f64,
}

impl AdamWConfig {
    /// The norm, over all of its parameters, from which on AdamW takes no gradient: the square of an element could be more
    /// than f32 holds, and a second moment that is infinite stays so. It leaves room for rounding and for the
    /// correction of bias.
    pub const LARGEST_NORM: f64 = 1e19;
}

impl Default for AdamWConfig {
    /// lr 3e-4, betas 0.9 and 0.95, eps 1e-10, no decay.
    fn default() -> Self {
        Self {
            lr: 3e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-10,
            weight_decay: 0.0,
        }
    }
}

impl AdamWConfig {
    /// Whether every field is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that is not, and its value.
    pub fn validate(&self) -> Result<(), Error> {
        non_negative("adamw.lr", self.lr)?;
        below_one("adamw.beta1", self.beta1)?;
        below_one("adamw.beta2", self.beta2)?;
        // As f32, in which it is added: a smaller one would be zero there.
        let eps = self.eps;
        let added = eps as f32;
        check(
            "adamw.eps",
            eps,
            added > 0.0 && added.is_finite(),
            "positive and finite as f32",
        )?;
        non_negative("adamw.weight_decay", self.weight_decay)?;
        shrinking("adamw.lr * adamw.weight_decay", self.lr * self.weight_decay)
    }
}

/// Hyper-parameters of both groups.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MuonWithAdamWConfig {
    /// Those of hidden matrices.
    pub muon: MuonConfig,
    /// Those of everything else.
    pub adamw: AdamWConfig,
}

impl MuonWithAdamWConfig {
    /// Whether every field is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that is not, and its value.
    pub fn validate(&self) -> Result<(), Error> {
        self.muon.validate()?;
        self.adamw.validate()
    }
}

pub(crate) fn check(
    field: &'static str,
    value: f64,
    ok: bool,
    requirement: &'static str,
) -> Result<(), Error> {
    if ok {
        Ok(())
    } else {
        Err(Error::Config {
            field,
            value,
            requirement,
        })
    }
}

fn non_negative(field: &'static str, value: f64) -> Result<(), Error> {
    check(
        field,
        value,
        (value as f32).is_finite() && value >= 0.0,
        "finite as f32 and not negative",
    )
}

fn below_one(field: &'static str, value: f64) -> Result<(), Error> {
    check(field, value, (0.0..1.0).contains(&value), "in [0, 1)")
}

/// A decay of more than everything would flip the weights' signs.
fn shrinking(field: &'static str, value: f64) -> Result<(), Error> {
    check(field, value, value <= 1.0, "at most 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        MuonWithAdamWConfig::default().validate().unwrap();
    }

    #[test]
    fn each_field_is_checked_by_name() {
        let muon = |change: fn(&mut MuonConfig)| {
            let mut config = MuonConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        let adamw = |change: fn(&mut AdamWConfig)| {
            let mut config = AdamWConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        let cases = [
            (muon(|c| c.lr = -0.5), "muon.lr = -0.5"),
            (muon(|c| c.lr = 1e39), "muon.lr = 1"),
            (muon(|c| c.momentum = 1.0), "muon.momentum = 1"),
            (
                muon(|c| c.weight_decay = f64::NAN),
                "muon.weight_decay = NaN",
            ),
            (
                muon(|c| c.weight_decay = 100.0),
                "muon.lr * muon.weight_decay = 2",
            ),
            (
                muon(|c| c.newton_schulz.steps = 0),
                "muon.newton_schulz.steps = 0",
            ),
            (
                muon(|c| c.newton_schulz.steps = 100),
                "muon.newton_schulz.steps = 100",
            ),
            (adamw(|c| c.lr = f64::INFINITY), "adamw.lr = inf"),
            (adamw(|c| c.beta1 = -0.1), "adamw.beta1 = -0.1"),
            (adamw(|c| c.beta2 = f64::NAN), "adamw.beta2 = NaN"),
            (adamw(|c| c.eps = 1e-60), "adamw.eps = 0.00"),
            (adamw(|c| c.weight_decay = -1.0), "adamw.weight_decay = -1"),
        ];
        for (message, expected) in cases {
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
