//! Steady state on a CPU: a step frees what it allocates. A binary of its own, whose allocator counts.

use std::alloc::System;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{Muon, MuonConfig, NewtonSchulz};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes that are allocated.
fn held() -> isize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

/// Bytes held after a few steps, and after a thousand more.
fn of_steps(mut step: impl FnMut()) -> [isize; 2] {
    (0..10).for_each(|_| step());
    let before = held();
    (0..1000).for_each(|_| step());
    [before, held()]
}

fn filled(rows: usize, cols: usize) -> Tensor {
    let data: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(data, (rows, cols), &Device::Cpu).expect("so many elements")
}

/// In one test, since the allocator counts for all threads.
#[test]
fn a_thousand_steps_hold_no_more_than_the_first() {
    let matrices = [filled(24, 60), filled(60, 24), filled(32, 32)];
    let ns = NewtonSchulz::default();
    let [before, after] = of_steps(|| drop(ns.orthogonalize_all(&matrices).unwrap()));
    assert!(
        after <= before,
        "newton-schulz: {before} bytes, then {after}"
    );

    let vars: Vec<_> = matrices
        .iter()
        .map(|x| Var::from_tensor(&x.zeros_like().unwrap()).unwrap())
        .collect();
    let mut muon = Muon::new(vars.clone(), MuonConfig::default()).unwrap();
    let [before, after] = of_steps(|| {
        let losses: Vec<_> = vars
            .iter()
            .zip(&matrices)
            .map(|(var, target)| {
                let difference = (var.as_tensor() - target).unwrap();
                difference.sqr().unwrap().sum_all().unwrap()
            })
            .collect();
        let loss = Tensor::stack(&losses, 0).unwrap().sum_all().unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        muon.backward_step(&loss).unwrap();
    });
    assert!(after <= before, "muon: {before} bytes, then {after}");
}
