use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{MuonWithAdamW, MuonWithAdamWConfig, Precision, Rules};

use super::{Table, device};
use crate::oracle::Matrix;
use crate::tensors::gaussian;

const SHAPES: [(&str, &[usize]); 6] = [
    ("wide.weight", &[24, 40]),
    ("tall.weight", &[70, 20]),
    ("square.weight", &[33, 33]),
    ("stack.weight", &[3, 10, 30]),
    ("embed.weight", &[50, 16]),
    ("bias", &[37]),
];

/// Five steps towards fixed targets; the weights flat, as f32 on the CPU.
fn train(device: &Device, dtype: DType, precision: Precision) -> Vec<Tensor> {
    let var = |(i, (_, shape)): (usize, &(&str, &[usize]))| {
        let x = gaussian(shape, i as u64).to_dtype(dtype).unwrap();
        Var::from_tensor(&x.to_device(device).unwrap()).unwrap()
    };
    let vars: Vec<_> = SHAPES.iter().enumerate().map(var).collect();
    let named = SHAPES.iter().zip(&vars);
    let named = named.map(|((name, _), var)| ((*name).to_owned(), var.clone()));
    let mut config = MuonWithAdamWConfig::default();
    config.muon.newton_schulz.iterate = precision;
    config.muon.weight_decay = 0.1;
    let mut optimizer =
        MuonWithAdamW::from_named(named.collect(), &Rules::default(), config).unwrap();
    for _ in 0..5 {
        let loss = vars.iter().enumerate().map(|(i, var)| {
            let target = gaussian(var.dims(), 100 + i as u64)
                .to_dtype(dtype)
                .unwrap();
            let target = target.to_device(device).unwrap();
            (var.as_tensor() - target)
                .unwrap()
                .sqr()
                .unwrap()
                .sum_all()
                .unwrap()
        });
        let loss = loss.reduce(|a, b| (a + b).unwrap()).unwrap();
        optimizer.backward_step(&loss).unwrap();
    }
    let flat = |var: &Var| {
        let x = var.as_detached_tensor().to_dtype(DType::F32).unwrap();
        x.flatten_all().unwrap().to_device(&Device::Cpu).unwrap()
    };
    vars.iter().map(flat).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn five_steps_are_those_of_the_cpu() {
    let device = device();
    let mut table = Table::new("five steps of MuonWithAdamW, CUDA against CPU in f32");
    for dtype in [DType::F32, DType::BF16] {
        let expected = train(&Device::Cpu, dtype, Precision::F32);
        for (precision, bound) in [
            (Precision::F32, 1e-4),
            (Precision::Auto, 1e-2),
            (Precision::F16, 1e-2),
            (Precision::BF16, 3e-2),
        ] {
            let got = train(&device, dtype, precision);
            for ((name, _), (got, expected)) in SHAPES.iter().zip(got.iter().zip(&expected)) {
                let row = |x: &Tensor| Matrix::from_tensor(&x.unsqueeze(0).unwrap());
                let error = row(got).error_against(&row(expected));
                // A bf16 weight may be rounded to its neighbour.
                let bound = if dtype == DType::F32 {
                    bound
                } else {
                    bound + 1e-2
                };
                table.line(
                    &format!("{name} in {dtype:?}, iterated in {precision}"),
                    &format!("{error:.1e}"),
                    error < bound,
                );
            }
        }
    }
    table.finish();
}
