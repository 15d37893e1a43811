use candle_core::{DType, Device, Tensor};
use polarshard_muon::{
    AdamWConfig, Gradient, Update, accumulate, adamw_update, apply_updates, copy_all,
    momentum_update,
};

use super::{Table, device};
use crate::tensors::{apply_update, bits, copy, gaussian};

/// On both sides of the blocks of 1024 elements, and more than one wave of them.
const LENGTHS: [usize; 8] = [1, 3, 255, 1023, 1024, 1025, 100_003, 3_000_001];
/// Elements before a view: with and without the alignment of wider loads.
const OFFSETS: [usize; 3] = [0, 1, 64];

/// Magnitudes from subnormal to 1e30.
fn wild(len: usize, seed: u64) -> Tensor {
    let exponents = gaussian(&[len], seed + 1000).affine(12.0, 0.0).unwrap();
    let exponents = exponents.clamp(-44f32, 30f32).unwrap();
    let powers = exponents.affine(std::f64::consts::LN_10, 0.0).unwrap();
    (gaussian(&[len], seed) * powers.exp().unwrap()).unwrap()
}

/// A buffer on a device, and the run of it that is stepped.
struct Run {
    buffer: Tensor,
    view: Tensor,
}

impl Run {
    fn new(values: &Tensor, offset: usize, device: &Device) -> Self {
        let len = values.elem_count();
        let margin = gaussian(&[offset + 5], 77)
            .to_dtype(values.dtype())
            .unwrap();
        let (before, after) = (margin.narrow(0, 0, offset), margin.narrow(0, offset, 5));
        let parts = [before.unwrap(), values.clone(), after.unwrap()];
        let parts: Vec<_> = parts.into_iter().filter(|x| x.elem_count() > 0).collect();
        let buffer = Tensor::cat(&parts, 0).unwrap().to_device(device).unwrap();
        let view = buffer.narrow(0, offset, len).unwrap();
        Self { buffer, view }
    }
}

/// Runs steps on both devices and compares all buffers, margins included.
fn compare(
    table: &mut Table,
    step: &str,
    operands: &[Tensor],
    f: &dyn Fn(&[Tensor]) -> Option<Tensor>,
) {
    let device = device();
    for offset in OFFSETS {
        let run = |device: &Device| {
            let runs: Vec<_> = operands
                .iter()
                .map(|x| Run::new(x, offset, device))
                .collect();
            let views: Vec<_> = runs.iter().map(|run| run.view.clone()).collect();
            let result = f(&views);
            let all = runs.iter().map(|run| &run.buffer).chain(&result);
            all.map(bits).collect::<Vec<_>>()
        };
        let (expected, got) = (run(&Device::Cpu), run(&device));
        let differing: usize = expected
            .iter()
            .zip(&got)
            .map(|(a, b)| a.iter().zip(b).filter(|(a, b)| a != b).count())
            .sum();
        let len = operands[0].elem_count();
        table.line(
            &format!("{step}, {len} elements at {offset}"),
            &format!("{differing} bits differ"),
            differing == 0,
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn steps_have_the_bits_of_the_cpu() {
    let mut table = Table::new("element-wise steps, CUDA against CPU");
    for len in LENGTHS {
        let operands: Vec<_> = (0..4).map(|seed| wild(len, seed)).collect();
        let config = AdamWConfig {
            weight_decay: 0.1,
            ..AdamWConfig::default()
        };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let values = operands[1].clamp(-6e4f32, 6e4f32).unwrap();
            let values = values.to_dtype(dtype).unwrap();
            for nesterov in [true, false] {
                let operands = [operands[0].clone(), values.clone()];
                let step = format!("momentum {dtype:?}, nesterov {nesterov}");
                compare(&mut table, &step, &operands, &|x| {
                    let gradient = Gradient {
                        values: &x[1],
                        mean: 1.0 / 3.0,
                        clip: 0.7,
                    };
                    Some(momentum_update(&x[0], gradient, 0.95, nesterov).unwrap())
                });
            }
            let mut moments = operands.clone();
            moments[2] = moments[2].abs().unwrap();
            moments[3] = values.clone();
            compare(&mut table, &format!("adamw {dtype:?}"), &moments, &|x| {
                let gradient = Gradient {
                    values: &x[3],
                    mean: 1.0 / 3.0,
                    clip: 0.7,
                };
                adamw_update(&x[0], &x[1], &x[2], gradient, 3, &config).unwrap();
                None
            });
            let operands = [operands[0].clone(), values];
            compare(&mut table, &format!("apply {dtype:?}"), &operands, &|x| {
                apply_update(&x[0], &x[1], 1.3, 0.02, 0.1).unwrap();
                None
            });
            let other = operands[0].clamp(-6e4f32, 6e4f32).unwrap();
            for to in [DType::F32, DType::F16, DType::BF16] {
                let operands = [other.to_dtype(to).unwrap(), operands[1].clone()];
                compare(
                    &mut table,
                    &format!("copy {dtype:?} to {to:?}"),
                    &operands,
                    &|x| {
                        copy(&x[0], &x[1]).unwrap();
                        None
                    },
                );
            }
            for factor in [1.0, 0.3] {
                compare(
                    &mut table,
                    &format!("accumulate {dtype:?} times {factor}"),
                    &operands,
                    &|x| {
                        accumulate(&x[0], &x[1], factor).unwrap();
                        None
                    },
                );
            }
        }
    }
    table.finish();
}

/// More than a launch takes, of every length up to beyond two wide accesses and beyond a chunk, at every alignment.
#[test]
#[ignore = "needs a GPU"]
fn many_copies_have_the_bits_of_the_cpu() {
    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    let lengths = (0..20).chain([8191, 8192, 8193, 20_000]);
    let cases: Vec<_> = lengths
        .flat_map(|len| (0..9).map(move |offset| (len, offset)))
        .collect();
    let run = |device: &Device| {
        let mut buffers = Vec::new();
        let mut copies = Vec::new();
        for (index, (len, offset)) in cases.iter().enumerate() {
            let (to, from) = (FLOATS[index % 3], FLOATS[index / 3 % 3]);
            let make = |seed: usize, dtype: DType| {
                let values = gaussian(&[len + 20], seed as u64).to_dtype(dtype).unwrap();
                values.to_device(device).unwrap()
            };
            let (target, values) = (make(index, to), make(1000 + index, from));
            let at = |x: &Tensor, start: usize| x.narrow(0, start, *len).unwrap();
            copies.push((at(&target, *offset), at(&values, index % 11)));
            buffers.push(target);
        }
        let pairs: Vec<_> = copies
            .iter()
            .map(|(target, values)| (target, values))
            .collect();
        copy_all(&pairs).unwrap();
        buffers.iter().map(bits).collect::<Vec<_>>()
    };
    assert_eq!(run(&device()), run(&Device::Cpu));
}

/// More than a launch takes, in turns of one dtype and of another.
#[test]
#[ignore = "needs a GPU"]
fn many_updates_have_the_bits_of_the_cpu() {
    let run = |device: &Device| {
        let tensor = |seed: usize, len: usize| gaussian(&[len], seed as u64);
        let operands: Vec<_> = (0..300)
            .map(|index| {
                let len = 1 + index * index % 9000;
                let dtype = [DType::F32, DType::BF16, DType::F16][index / 50 % 3];
                let update = tensor(1000 + index, len).to_dtype(dtype).unwrap();
                let [weights, update] =
                    [tensor(index, len), update].map(|x| x.to_device(device).unwrap());
                (weights, update)
            })
            .collect();
        let updates = operands
            .iter()
            .enumerate()
            .map(|(index, (weights, orthogonalized))| Update {
                weights,
                orthogonalized,
                scale: index as f64 / 100.0,
            });
        apply_updates(&updates.collect::<Vec<_>>(), 0.02, 0.1).unwrap();
        operands
            .iter()
            .map(|(weights, _)| bits(weights))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(&device()), run(&Device::Cpu));
}

#[test]
#[ignore = "needs a GPU"]
fn the_update_without_nesterov_is_no_view_of_the_momentum() {
    let device = device();
    let momentum = gaussian(&[100], 1).to_device(&device).unwrap();
    let gradient = gaussian(&[100], 2).to_device(&device).unwrap();
    let first = momentum_update(&momentum, &gradient, 0.5, false).unwrap();
    let before = bits(&first);
    momentum_update(&momentum, &gradient, 0.5, false).unwrap();
    assert_eq!(bits(&first), before);
}

#[test]
#[ignore = "needs a GPU"]
fn an_operand_on_another_device_is_an_error() {
    let device = device();
    let here = gaussian(&[10], 1);
    let there = gaussian(&[10], 2).to_device(&device).unwrap();
    assert!(momentum_update(&here, &there, 0.9, true).is_err());
    assert!(accumulate(&there, &here, 1.0).is_err());
    let before = bits(&there);
    assert!(copy(&there, &here).is_err());
    assert!(apply_update(&there, &here, 1.0, 0.1, 0.0).is_err());
    // One that is right before one that is not.
    let right = gaussian(&[10], 5).to_device(&device).unwrap();
    let second = there.zeros_like().unwrap();
    assert!(copy_all(&[(&there, &right), (&second, &here)]).is_err());
    assert_eq!(bits(&there), before);
    let other = gaussian(&[10], 3).to_device(&device).unwrap();
    let config = AdamWConfig::default();
    let before = bits(&there);
    assert!(adamw_update(&there, &here, &gaussian(&[10], 4), &other, 1, &config).is_err());
    assert_eq!(bits(&there), before);
}
