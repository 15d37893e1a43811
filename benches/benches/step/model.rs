//! The models of the bench: transformer blocks without attention, in bf16.

use std::num::NonZeroUsize;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap};
use polarshard_zero::ParamStore;

/// Rows of the embedding, which AdamW trains.
const VOCABULARY: usize = 50304;

/// A model, and milliseconds of its whole step on H200s, by world: what memory and FLOPs allow, and what is to be
/// reached.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    layers: usize,
    width: usize,
    floor_and_bar: [(f64, f64); 2],
    /// Elements of a bucket: larger ones take longer to fill, but send faster and split fewer matrices.
    pub(crate) bucket_size: NonZeroUsize,
}

pub(crate) const MODELS: [Model; 3] = [
    Model {
        name: "124M",
        layers: 12,
        width: 768,
        floor_and_bar: [(2.0, 3.5), (2.0, 3.0)],
        bucket_size: NonZeroUsize::new(25_000_000).unwrap(),
    },
    Model {
        name: "350M",
        layers: 24,
        width: 1024,
        floor_and_bar: [(7.0, 10.5), (6.5, 8.0)],
        bucket_size: NonZeroUsize::new(50_000_000).unwrap(),
    },
    Model {
        name: "1.3B",
        layers: 24,
        width: 2048,
        floor_and_bar: [(44.0, 58.0), (35.0, 38.0)],
        bucket_size: NonZeroUsize::new(100_000_000).unwrap(),
    },
];

impl Model {
    pub(crate) fn floor_and_bar(&self, world: usize) -> Option<(f64, f64)> {
        self.floor_and_bar.get(world - 1).copied()
    }

    /// Names and shapes, in the order of the forward pass.
    fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let d = self.width;
        let layer = |i| {
            let shapes = [
                ("norm1", vec![d]),
                ("qkv", vec![3 * d, d]),
                ("out", vec![d, d]),
                ("norm2", vec![d]),
                ("up", vec![4 * d, d]),
                ("down", vec![d, 4 * d]),
            ];
            shapes.map(|(name, shape)| (format!("layers.{i}.{name}.weight"), shape))
        };
        let embedding = ("embed.weight".to_owned(), vec![VOCABULARY, d]);
        (0..self.layers)
            .flat_map(layer)
            .chain([embedding])
            .collect()
    }

    /// Variables with drawn values.
    pub(crate) fn variables(&self, device: &Device) -> Result<Vec<(String, Var)>> {
        let parameters = self.parameters().into_iter();
        parameters
            .map(|(name, shape)| Ok((name, Var::from_tensor(&drawn(0.02, &shape, device)?)?)))
            .collect()
    }

    /// The model on variables of its own.
    pub(crate) fn on_variables(&self, device: &Device) -> Result<Network> {
        let map = VarMap::new();
        let network = self.build(&VarBuilder::from_varmap(&map, DType::BF16, device))?;
        for (name, shape) in self.parameters() {
            let variables = map.data().lock().expect("nobody has panicked");
            variables[&name].set(&drawn(0.02, &shape, device)?)?;
        }
        Ok(network)
    }

    /// The model on the weights of a store.
    pub(crate) fn on_store(&self, store: &ParamStore, device: &Device) -> Result<Network> {
        let network = self.build(&store.var_builder(DType::BF16, device))?;
        for (name, shape) in self.parameters() {
            store.set(&name, &drawn(0.02, &shape, device)?)?;
        }
        Ok(network)
    }

    /// With constant weights, which cost no time to draw.
    fn build(&self, vb: &VarBuilder<'_>) -> Result<Network> {
        let parameters = self.parameters().into_iter();
        let weights = parameters
            .map(|(name, shape)| vb.get_with_hints(shape, &name, Init::Const(1.0)))
            .collect::<Result<_>>()?;
        Ok(Network { weights })
    }

    pub(crate) fn inputs(&self, tokens: usize, device: &Device) -> Result<Tensor> {
        drawn(1.0, &[tokens, self.width], device)
    }
}

/// Normally distributed values in bf16.
pub(crate) fn drawn(deviation: f32, shape: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::randn(0.0, deviation, shape, device)?.to_dtype(DType::BF16)
}

/// A model that can be differentiated. It has the products of a transformer but those of attention, so that its
/// backward pass takes about as long for its parameters.
pub(crate) struct Network {
    weights: Vec<Tensor>,
}

impl Network {
    /// The mean square of the logits.
    pub(crate) fn loss(&self, inputs: &Tensor) -> Result<Tensor> {
        let (layers, embedding) = self.weights.split_at(self.weights.len() - 1);
        let d = inputs.dim(D::Minus1)?;
        let mut x = inputs.clone();
        for layer in layers.chunks_exact(6) {
            let [norm1, qkv, out, norm2, up, down] = layer else {
                unreachable!("chunks are exact")
            };
            let mixed = linear(&x.broadcast_mul(norm1)?, qkv)?;
            let part = |i| mixed.narrow(1, i * d, d);
            let mixed = ((part(0)? + part(1)?)? + part(2)?)?;
            x = (x + linear(&mixed, out)?)?;
            let hidden = linear(&x.broadcast_mul(norm2)?, up)?.relu()?;
            x = (x + linear(&hidden, down)?)?;
        }
        linear(&x, &embedding[0])?
            .sqr()?
            .mean_all()?
            .to_dtype(DType::F32)
    }
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}
