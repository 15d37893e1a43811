//! The shapes of published models.

use polarshard_partition::{Matrix, Param, Params, Span, Wire};

/// Builds a parameter list as a model would register it.
struct Model(Vec<Param>);

impl Model {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        let matrix = Matrix {
            span: Span::new(0, rows * cols),
            rows,
            cols,
            cost: newton_schulz(rows, cols),
        };
        self.0.push(Param {
            name: name.into(),
            shape: [rows, cols].into_iter().collect(),
            wire: Wire::BF16,
            matrices: vec![matrix],
        });
    }

    fn plain(&mut self, name: &str, shape: &[usize]) {
        self.0.push(Param {
            name: name.into(),
            shape: shape.into(),
            wire: Wire::BF16,
            matrices: vec![],
        });
    }

    fn build(self) -> Params {
        Params::new(self.0).unwrap()
    }
}

/// FLOPs of five Newton-Schulz steps of the cheaper form, n being the shorter side.
fn newton_schulz(rows: usize, cols: usize) -> u64 {
    let (n, m) = (rows.min(cols) as u64, rows.max(cols) as u64);
    if 2 * m > 3 * n {
        8 * n * n * m + 28 * n * n * n
    } else {
        20 * n * n * m + 10 * n * n * n
    }
}

pub(crate) fn gpt2_124m() -> Params {
    let mut model = Model(Vec::new());
    let d = 768;
    model.plain("wte", &[50257, d]);
    model.plain("wpe", &[1024, d]);
    for layer in 0..12 {
        let name = |part: &str| format!("h.{layer}.{part}");
        for norm in ["ln_1", "ln_2"] {
            model.plain(&name(&format!("{norm}.weight")), &[d]);
            model.plain(&name(&format!("{norm}.bias")), &[d]);
        }
        for (part, rows, cols) in [
            ("attn.c_attn", 3 * d, d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", 4 * d, d),
            ("mlp.c_proj", d, 4 * d),
        ] {
            model.matrix(&name(&format!("{part}.weight")), rows, cols);
            model.plain(&name(&format!("{part}.bias")), &[rows]);
        }
    }
    model.plain("ln_f.weight", &[d]);
    model.plain("ln_f.bias", &[d]);
    model.build()
}

/// The Llama family: grouped-query attention and a gated MLP.
fn llama(
    layers: usize,
    d: usize,
    kv: usize,
    inner: usize,
    vocabulary: usize,
    bias: bool,
) -> Params {
    let mut model = Model(Vec::new());
    model.plain("embed_tokens", &[vocabulary, d]);
    for layer in 0..layers {
        let name = |part: &str| format!("layers.{layer}.{part}");
        for (part, rows) in [("q_proj", d), ("k_proj", kv), ("v_proj", kv)] {
            model.matrix(&name(part), rows, d);
            if bias {
                model.plain(&name(&format!("{part}.bias")), &[rows]);
            }
        }
        model.matrix(&name("o_proj"), d, d);
        model.matrix(&name("gate_proj"), inner, d);
        model.matrix(&name("up_proj"), inner, d);
        model.matrix(&name("down_proj"), d, inner);
        model.plain(&name("input_layernorm"), &[d]);
        model.plain(&name("post_attention_layernorm"), &[d]);
    }
    model.plain("norm", &[d]);
    model.plain("lm_head", &[vocabulary, d]);
    model.build()
}

pub(crate) fn llama3_8b() -> Params {
    llama(32, 4096, 1024, 14336, 128_256, false)
}

pub(crate) fn llama3_70b() -> Params {
    llama(80, 8192, 1024, 28672, 128_256, false)
}

pub(crate) fn qwen25_7b() -> Params {
    llama(28, 3584, 512, 18944, 152_064, true)
}

/// DeepSeek-V3: latent attention, three dense layers, then 256 routed experts and a shared one.
pub(crate) fn deepseek_v3() -> Params {
    let mut model = Model(Vec::new());
    let d = 7168;
    model.plain("embed_tokens", &[129_280, d]);
    for layer in 0..61 {
        let name = |part: &str| format!("layers.{layer}.{part}");
        model.matrix(&name("q_a_proj"), 1536, d);
        model.matrix(&name("q_b_proj"), 24576, 1536);
        model.matrix(&name("kv_a_proj"), 576, d);
        model.matrix(&name("kv_b_proj"), 32768, 512);
        model.matrix(&name("o_proj"), d, 16384);
        for (norm, len) in [
            ("input_layernorm", d),
            ("q_a_layernorm", 1536),
            ("kv_a_layernorm", 512),
            ("post_attention_layernorm", d),
        ] {
            model.plain(&name(norm), &[len]);
        }
        let mut mlp = |part: &str, inner| {
            model.matrix(&name(&format!("{part}.gate_proj")), inner, d);
            model.matrix(&name(&format!("{part}.up_proj")), inner, d);
            model.matrix(&name(&format!("{part}.down_proj")), d, inner);
        };
        if layer < 3 {
            mlp("mlp", 18432);
            continue;
        }
        for expert in 0..256 {
            mlp(&format!("experts.{expert}"), 2048);
        }
        mlp("shared_experts", 2048);
        model.matrix(&name("gate"), 256, d);
    }
    model.plain("norm", &[d]);
    model.plain("lm_head", &[129_280, d]);
    model.build()
}
