//! A small transformer over bytes, of candle's differentiable operations alone: its fused softmax, norms and rotations
//! have no gradient.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::rotary_emb::rope_slow;
use candle_nn::{Embedding, Init, Linear, Module, VarBuilder, embedding, loss, ops};

use crate::options::Options;

const BYTES: usize = 256;

/// The model.
pub(crate) struct Gpt {
    embed: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    /// 0 at and before a position, -∞ after it, `(context, context)`.
    mask: Tensor,
    rotation: Rotation,
}

impl Gpt {
    /// A model whose weights come from `vb`; it computes on their device, in single precision.
    pub(crate) fn new(options: &Options, vb: &VarBuilder<'_>) -> Result<Self> {
        let (width, heads, context) = (
            options.width.get(),
            options.heads.get(),
            options.context.get(),
        );
        let layer = |index| Layer::new(width, heads, &vb.pp(format!("layers.{index}")));
        Ok(Self {
            embed: embedding(BYTES, width, vb.pp("embed"))?,
            layers: (0..options.layers.get())
                .map(layer)
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(width, vb, "norm")?,
            head: linear(width, BYTES, 0.1, &vb.pp("lm_head"))?,
            mask: causal(context, vb.device())?,
            rotation: Rotation::new(context, width / heads, vb.device())?,
        })
    }

    /// Where it computes.
    pub(crate) fn device(&self) -> &Device {
        self.mask.device()
    }

    /// The mean cross-entropy of the bytes `targets`, in nats, given those before them; both `(batch, context)`.
    pub(crate) fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(inputs)?;
        for layer in &self.layers {
            x = layer.forward(&x, &self.mask, &self.rotation)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        loss::cross_entropy(&logits.flatten_to(1)?, &targets.flatten_all()?)
    }
}

struct Layer {
    heads: usize,
    attention_norm: RmsNorm,
    qkv: Linear,
    out: Linear,
    mlp_norm: RmsNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(width: usize, heads: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            heads,
            attention_norm: RmsNorm::new(width, vb, "attention_norm")?,
            qkv: linear(width, 3 * width, 1.0, &vb.pp("qkv"))?,
            out: linear(width, width, 0.5, &vb.pp("out"))?,
            mlp_norm: RmsNorm::new(width, vb, "mlp_norm")?,
            up: linear(width, 4 * width, 1.0, &vb.pp("up"))?,
            down: linear(4 * width, width, 0.5, &vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor, rotation: &Rotation) -> Result<Tensor> {
        let x = (x + self.attention(&self.attention_norm.forward(x)?, mask, rotation)?)?;
        let hidden = self
            .up
            .forward(&self.mlp_norm.forward(&x)?)?
            .relu()?
            .sqr()?;
        &x + self.down.forward(&hidden)?
    }

    fn attention(&self, x: &Tensor, mask: &Tensor, rotation: &Rotation) -> Result<Tensor> {
        let (batch, context, width) = x.dims3()?;
        let features = width / self.heads;
        let qkv = self
            .qkv
            .forward(x)?
            .reshape((batch, context, 3, self.heads, features))?;
        let part = |index| {
            qkv.narrow(2, index, 1)?
                .squeeze(2)?
                .transpose(1, 2)?
                .contiguous()
        };
        let (q, k, v) = (
            rotation.apply(&part(0)?)?,
            rotation.apply(&part(1)?)?,
            part(2)?,
        );
        let scores = (q.matmul(&k.t()?)? * (features as f64).powf(-0.5))?;
        let weights = ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?;
        let mixed = weights
            .matmul(&v)?
            .transpose(1, 2)?
            .reshape((batch, context, width))?;
        self.out.forward(&mixed)
    }
}

struct RmsNorm {
    gain: Tensor,
}

impl RmsNorm {
    fn new(width: usize, vb: &VarBuilder<'_>, name: &str) -> Result<Self> {
        Ok(Self {
            gain: vb.get_with_hints(width, name, Init::Const(1.0))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean_square + 1e-6)?.sqrt()?)?
            .broadcast_mul(&self.gain)
    }
}

/// Rotary positions: the sines and cosines of each position's angles, `(context, features / 2)`.
struct Rotation {
    sin: Tensor,
    cos: Tensor,
}

impl Rotation {
    fn new(context: usize, features: usize, device: &Device) -> Result<Self> {
        let half = features / 2;
        let frequencies: Vec<_> = (0..half)
            .map(|i| 1e4f32.powf(-(i as f32) / half as f32))
            .collect();
        let positions = Tensor::arange(0, context as u32, device)?
            .to_dtype(DType::F32)?
            .unsqueeze(1)?;
        let angles = positions.broadcast_mul(&Tensor::new(frequencies, device)?)?;
        Ok(Self {
            sin: angles.sin()?,
            cos: angles.cos()?,
        })
    }

    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        rope_slow(x, &self.cos, &self.sin)
    }
}

/// A linear layer without bias, drawn so that its outputs have `gain` times the magnitude of its inputs.
fn linear(inputs: usize, outputs: usize, gain: f64, vb: &VarBuilder<'_>) -> Result<Linear> {
    let init = Init::Randn {
        mean: 0.0,
        stdev: gain / (inputs as f64).sqrt(),
    };
    Ok(Linear::new(
        vb.get_with_hints((outputs, inputs), "weight", init)?,
        None,
    ))
}

fn causal(context: usize, device: &Device) -> Result<Tensor> {
    let masked = |row, col| if col > row { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<_> = (0..context)
        .flat_map(|row| (0..context).map(move |col| masked(row, col)))
        .collect();
    Tensor::from_vec(mask, (context, context), device)
}
