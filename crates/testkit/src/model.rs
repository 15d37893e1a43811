//! Models as plain lists of named parameters, and the gradients that ranks would produce for them.

use candle_core::{Device, Result, Tensor};
use polarshard_muon::{Rule, Rules};
use polarshard_partition::DigestWriter;
use polarshard_zero::Roles;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// On which ranks a parameter gets gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// On all.
    Always,
    /// On even ranks; it is optional.
    EvenRanks,
    /// On none; it is optional.
    Never,
    /// On none, for it is not trained.
    Frozen,
}

/// A parameter of a model.
#[derive(Debug, Clone)]
pub struct TestParam {
    /// Its name.
    pub name: &'static str,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Where it gets gradients.
    pub presence: Presence,
    /// How often the model uses it: its gradient is the sum over the uses.
    pub uses: usize,
}

/// A model without a forward pass.
#[derive(Debug, Clone)]
pub struct Model {
    /// Its parameters, in registration order.
    pub params: Vec<TestParam>,
    /// How they are routed.
    pub rules: Rules,
    /// Which of them are optional or frozen.
    pub roles: Roles,
}

/// The values that gradients are drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draw {
    /// Integers from -8 to 8: sums over ranks and micro-batches are exact in f32, in any order.
    Integers,
    /// Normally distributed: matrices have full rank, sums round.
    Gaussian,
}

/// What the backward pass of one micro-batch gives on one rank.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Its weight in the mean.
    pub weight: f64,
    /// By trained parameter; `None` where none came.
    pub gradients: Vec<Option<Tensor>>,
}

/// The gradients of one step, by micro-batch and rank.
pub type StepGradients = Vec<Vec<MicroBatch>>;

impl Model {
    /// Every kind of parameter that a layout must cope with, small.
    pub fn everything() -> Self {
        let params = [
            // First, so that their buckets are the last ones: the others fill while gradients come.
            ("unused.weight", &[5, 4][..], Presence::Never, 1),
            ("unused.bias", &[3], Presence::Never, 1),
            ("sometimes.weight", &[4, 6], Presence::EvenRanks, 1),
            ("sometimes.bias", &[5], Presence::EvenRanks, 1),
            ("embed.weight", &[10, 6], Presence::Always, 2),
            ("blocks.0.qkv.weight", &[20, 6], Presence::Always, 1),
            ("blocks.0.qkv.bias", &[20], Presence::Always, 1),
            ("blocks.0.up.weight", &[16, 6], Presence::Always, 1),
            ("blocks.0.down.weight", &[6, 16], Presence::Always, 1),
            ("blocks.0.norm.weight", &[6], Presence::Always, 1),
            ("blocks.1.wide.weight", &[11, 23], Presence::Always, 1),
            ("blocks.1.square.weight", &[8, 8], Presence::Always, 1),
            ("blocks.1.experts", &[3, 6, 5], Presence::Always, 1),
            ("blocks.1.tied.weight", &[7, 6], Presence::Always, 2),
            ("blocks.1.heads.weight", &[12, 5], Presence::Always, 1),
            ("conv.weight", &[4, 3, 2, 2], Presence::Always, 1),
            ("conv.empty", &[0, 4], Presence::Always, 1),
            ("frozen.weight", &[4, 4], Presence::Frozen, 1),
            ("scalar", &[], Presence::Always, 1),
        ];
        Self {
            params: params
                .iter()
                .map(|(name, shape, presence, uses)| param(name, shape, *presence, *uses))
                .collect(),
            rules: Rules::new()
                .with("*.qkv.weight", Rule::SplitRows(vec![12, 4, 4]))
                .with("*.heads.weight", Rule::Heads(3)),
            roles: Roles::default()
                .frozen("frozen.*")
                .optional("unused.*")
                .optional("sometimes.*"),
        }
    }

    /// Three elements a flat space: from three ranks on, most own nothing, and padding is on several of them.
    pub fn nearly_nothing() -> Self {
        let params = vec![
            param("w", &[1, 3], Presence::Always, 1),
            param("b", &[3], Presence::Always, 1),
        ];
        Self {
            params,
            rules: Rules::new(),
            roles: Roles::default(),
        }
    }

    /// The parameters that are not frozen, in registration order.
    pub fn trained(&self) -> impl Iterator<Item = &TestParam> {
        self.params
            .iter()
            .filter(|param| param.presence != Presence::Frozen)
    }

    /// The initial values of all parameters, normally distributed with deviation 1/2.
    ///
    /// # Errors
    /// Of making tensors.
    pub fn initial(&self, seed: u64) -> Result<Vec<(String, Tensor)>> {
        let value = |param: &TestParam| {
            let mut rng = generator(seed, param.name, [0; 3]);
            let values = (0..param.elems())
                .map(|_| 0.5 * rng.sample::<f32, _>(StandardNormal))
                .collect();
            Ok((
                param.name.to_owned(),
                Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu)?,
            ))
        };
        self.params.iter().map(value).collect()
    }

    /// The gradients of a step: independent over ranks, micro-batches and steps.
    ///
    /// # Errors
    /// Of making tensors.
    pub fn gradients(
        &self,
        draw: Draw,
        seed: u64,
        step: usize,
        accumulate: usize,
        world: usize,
    ) -> Result<StepGradients> {
        let micro_batch = |micro, rank| {
            let gradient = |param: &TestParam| match param.presence {
                Presence::Never | Presence::Frozen => Ok(None),
                Presence::EvenRanks if rank % 2 == 1 => Ok(None),
                _ => param
                    .gradient(draw, seed, [1 + step, micro, rank])
                    .map(Some),
            };
            let gradients = self.trained().map(gradient).collect::<Result<_>>()?;
            Ok(MicroBatch {
                weight: 1.0,
                gradients,
            })
        };
        (0..accumulate)
            .map(|micro| (0..world).map(|rank| micro_batch(micro, rank)).collect())
            .collect()
    }
}

impl TestParam {
    /// How many elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    fn gradient(&self, draw: Draw, seed: u64, place: [usize; 3]) -> Result<Tensor> {
        let mut rng = generator(seed, self.name, place);
        let mut element = || match draw {
            Draw::Integers => rng.random_range(-8i8..=8).into(),
            Draw::Gaussian => rng.sample::<f32, _>(StandardNormal),
        };
        let mut gradient = vec![0f32; self.elems()];
        for _ in 0..self.uses {
            gradient.iter_mut().for_each(|sum| *sum += element());
        }
        Tensor::from_vec(gradient, self.shape.as_slice(), &Device::Cpu)
    }
}

fn param(name: &'static str, shape: &[usize], presence: Presence, uses: usize) -> TestParam {
    TestParam {
        name,
        shape: shape.to_vec(),
        presence,
        uses,
    }
}

/// A generator for one tensor, independent of all others.
fn generator(seed: u64, name: &str, place: [usize; 3]) -> ChaCha8Rng {
    let mut digest = DigestWriter::new().u64(seed).str(name);
    for number in place {
        digest = digest.u64(number as u64);
    }
    ChaCha8Rng::seed_from_u64(digest.finish().0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::values;

    #[test]
    fn gradients_differ_by_place_and_repeat() {
        let model = Model::everything();
        let gradients = |step| model.gradients(Draw::Gaussian, 1, step, 2, 2).unwrap();
        let (first, again, later) = (gradients(0), gradients(0), gradients(1));
        let wide = model
            .trained()
            .position(|param| param.name == "blocks.1.wide.weight")
            .unwrap();
        let wide = |step: &StepGradients, micro: usize, rank: usize| {
            values(step[micro][rank].gradients[wide].as_ref().unwrap()).unwrap()
        };
        assert_eq!(wide(&first, 0, 1), wide(&again, 0, 1));
        for other in [wide(&first, 0, 0), wide(&first, 1, 1), wide(&later, 0, 1)] {
            assert_ne!(wide(&first, 0, 1), other);
        }
    }

    #[test]
    fn presence_is_by_rank() {
        let model = Model::everything();
        let step = model.gradients(Draw::Integers, 1, 0, 1, 2).unwrap();
        for (index, param) in model.trained().enumerate() {
            let present = [0, 1].map(|rank: usize| step[0][rank].gradients[index].is_some());
            let expected = match param.presence {
                Presence::Always => [true, true],
                Presence::EvenRanks => [true, false],
                Presence::Never | Presence::Frozen => [false, false],
            };
            assert_eq!(present, expected, "{}", param.name);
        }
    }
}
