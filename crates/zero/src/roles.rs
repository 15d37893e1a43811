//! Which named tensors are trained, by name pattern.

use wildmatch::WildMatch;

use crate::error::{Error, Result};

/// What a named tensor is to the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Trained; a gradient must reach it in every step.
    Required,
    /// Trained; steps without a gradient leave it as it is.
    Optional,
    /// A plain tensor that never changes and is in no group.
    Frozen,
    /// A variable in no group, changed by the model itself (`running_mean`, `running_var`).
    Buffer,
}

/// Roles by name pattern (`*` stands for any text, `?` for one character; case is ignored); what no pattern names is
/// [`Role::Required`]. The first pattern that matches decides.
///
/// ```
/// use polarshard_zero::{Role, Roles};
///
/// let roles = Roles::default().frozen("encoder.*").optional("*.expert.?.weight");
/// assert_eq!(roles.of("encoder.0.weight"), Role::Frozen);
/// assert_eq!(roles.of("bn.running_mean"), Role::Buffer);
/// assert_eq!(roles.of("decoder.0.weight"), Role::Required);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Roles {
    patterns: Vec<(String, Role)>,
}

impl Roles {
    /// Names that are frozen.
    pub fn frozen(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, Role::Frozen)
    }

    /// Names of buffers, besides every `running_mean` and `running_var`.
    pub fn buffer(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, Role::Buffer)
    }

    /// Names that may go without a gradient.
    pub fn optional(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, Role::Optional)
    }

    fn with(mut self, pattern: impl Into<String>, role: Role) -> Self {
        self.patterns.push((pattern.into(), role));
        self
    }

    /// The role of a name.
    pub fn of(&self, name: &str) -> Role {
        let declared = self
            .patterns
            .iter()
            .find(|(pattern, _)| matches(pattern, name));
        match declared {
            Some((_, role)) => *role,
            None if matches("*running_mean", name) || matches("*running_var", name) => Role::Buffer,
            None => Role::Required,
        }
    }

    /// Checks that every pattern names something.
    pub(crate) fn check<'a>(&self, names: &(impl Iterator<Item = &'a str> + Clone)) -> Result<()> {
        for (pattern, role) in &self.patterns {
            if !names.clone().any(|name| matches(pattern, name)) {
                let role = match role {
                    Role::Required => "required",
                    Role::Optional => "optional",
                    Role::Frozen => "frozen",
                    Role::Buffer => "a buffer",
                };
                return Err(Error::UnmatchedPattern {
                    pattern: pattern.clone(),
                    role,
                });
            }
        }
        Ok(())
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    WildMatch::new_case_insensitive(pattern).matches(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pattern_decides_and_case_is_ignored() {
        let roles = Roles::default().optional("A.*").frozen("*.weight");
        assert_eq!(roles.of("a.weight"), Role::Optional);
        assert_eq!(roles.of("B.WEIGHT"), Role::Frozen);
        assert_eq!(roles.of("layer.Running_Var"), Role::Buffer);
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_named() {
        let roles = Roles::default().frozen("missing.*");
        let error = roles
            .check(&["a.weight"].into_iter())
            .expect_err("nothing is called missing");
        assert!(error.to_string().contains("`missing.*`"), "{error}");
    }
}
