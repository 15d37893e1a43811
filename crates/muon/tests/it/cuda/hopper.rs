//! The kernels for Hopper: against float64 at tile edges, against cuBLAS in f32 at larger sizes, and
//! against themselves, bit for bit, in other batches, chunks and runs.

use std::slice;

use candle_core::cuda_backend::cudarc::driver::result::mem_get_info;
use candle_core::{DType, Device, Tensor};
use polarshard_muon::{Coefficients, Error, Kernels, Method, NewtonSchulz, Precision, Products};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::newton_schulz::{emulated, on_device, with};
use super::{Table, device};
use crate::oracle::{self, Matrix};
use crate::tensors::{bits, gaussian};

const PRECISIONS: [Precision; 2] = [Precision::F16, Precision::BF16];
const METHODS: [Method; 2] = [Method::Standard, Method::Gram];

fn hopper(method: Method, iterate: Precision) -> NewtonSchulz {
    NewtonSchulz {
        kernels: Kernels::Hopper,
        ..with(method, Coefficients::default(), iterate)
    }
}

/// The device, if these kernels run on it.
fn hopper_device() -> Option<Device> {
    let device = device();
    let has = hopper(Method::Auto, Precision::F16)
        .check_device(&device)
        .is_ok();
    if !has {
        println!("skipped: not a device of compute capability 9.0");
    }
    has.then_some(device)
}

fn random(shape: &[usize], seed: u64, device: &Device) -> Tensor {
    gaussian(shape, seed).to_device(device).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn agrees_with_float64_at_tile_edges() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels at tile edges, against float64");
    for (rows, cols) in [
        (1, 1),
        (1, 300),
        (7, 8),
        (8, 7),
        (63, 65),
        (64, 64),
        (65, 63),
        (127, 129),
        (128, 256),
        (129, 129),
        (191, 193),
        (200, 333),
        (255, 257),
        (257, 255),
        (256, 300),
        (320, 320),
    ] {
        let x = Matrix::gaussian(rows, cols, 1);
        for precision in PRECISIONS {
            for method in METHODS {
                let ns = hopper(method, precision);
                let exact = Matrix::from_tensor(&x.to_tensor());
                let steps = ns.coefficients.steps(ns.steps);
                let expected = oracle::newton_schulz(&exact, &steps);
                let got = Matrix::from_tensor(&on_device(&ns, &x.to_tensor(), &device));
                let error = got.error_against(&expected);
                let allowed = emulated(&exact, &ns).error_against(&expected);
                // Small matrices have few roundings, of which one more or less is seen.
                let rounding = match precision {
                    Precision::F16 => 5e-4,
                    _ => 4e-3,
                };
                table.line(
                    &format!("{rows} x {cols} {method} {precision}"),
                    &format!("{error:.2e}, emulated {allowed:.2e}"),
                    error <= 1.25 * allowed + rounding,
                );
            }
        }
    }
    table.finish();
}

/// Against cuBLAS in f32, an error of at most a quarter more than that of cuBLAS in 16 bits.
#[test]
#[ignore = "needs a GPU"]
fn agrees_with_cublas_on_random_shapes() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels and cuBLAS on random shapes, against f32");
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for case in 0..24u64 {
        let batch = rng.random_range(1..=4);
        let rows = rng.random_range(1..=2200);
        let cols = rng.random_range(1..=2200);
        let x = random(&[batch, rows, cols], case, &device);
        for precision in PRECISIONS {
            for method in METHODS {
                let flat = |ns: NewtonSchulz| {
                    let out = ns.orthogonalize(&x).unwrap().flatten_all().unwrap();
                    out.to_device(&Device::Cpu).unwrap().unsqueeze(0).unwrap()
                };
                let cublas = |precision| {
                    flat(NewtonSchulz {
                        kernels: Kernels::Cublas,
                        ..with(method, Coefficients::default(), precision)
                    })
                };
                let exact = Matrix::from_tensor(&cublas(Precision::F32));
                let allowed = Matrix::from_tensor(&cublas(precision)).error_against(&exact);
                let got = Matrix::from_tensor(&flat(hopper(method, precision)));
                let error = got.error_against(&exact);
                table.line(
                    &format!("{batch} x {rows} x {cols} {method} {precision}"),
                    &format!("{error:.2e}, cuBLAS {allowed:.2e}"),
                    error <= 1.25 * allowed + 1e-5,
                );
            }
        }
    }
    table.finish();
}

/// Wide, tall and square matrices of all dtypes, some at addresses of no alignment.
fn mixed(device: &Device) -> Vec<Tensor> {
    let shapes = [
        (70, 200),
        (200, 70),
        (133, 133),
        (64, 520),
        (520, 64),
        (9, 31),
    ];
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let mut matrices = Vec::new();
    for i in 0..150usize {
        let (rows, cols) = shapes[i % 6];
        let offset = i % 5;
        let buffer = random(&[offset + rows * cols], i as u64, device);
        let buffer = buffer.to_dtype(dtypes[i / 7 % 3]).unwrap();
        let run = buffer.narrow(0, offset, rows * cols).unwrap();
        matrices.push(run.reshape((rows, cols)).unwrap());
    }
    matrices
}

#[test]
#[ignore = "needs a GPU"]
fn a_matrix_has_the_same_bits_in_any_batch_under_any_cap_and_at_any_run() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels against themselves");
    let matrices = mixed(&device);
    for precision in PRECISIONS {
        for method in [Method::Auto, Method::Standard, Method::Gram] {
            let ns = hopper(method, precision);
            let together: Vec<_> = ns.orthogonalize_all(&matrices).unwrap();
            let expected: Vec<_> = together.iter().map(bits).collect();
            let mut differing = |what: &str, got: &dyn Fn(usize) -> Vec<u32>| {
                let count = (0..matrices.len()).filter(|&i| got(i) != expected[i]);
                let count = count.count();
                table.line(
                    &format!("{method} {precision}: {what}"),
                    &format!("{count} of {} differ", matrices.len()),
                    count == 0,
                );
            };
            differing("alone", &|i| bits(&ns.orthogonalize(&matrices[i]).unwrap()));
            for workspace_bytes in [0, 1 << 20, 5 << 20] {
                let capped = NewtonSchulz {
                    workspace_bytes,
                    ..ns.clone()
                };
                let got = capped.orthogonalize_all(&matrices).unwrap();
                differing(&format!("{workspace_bytes} bytes"), &|i| bits(&got[i]));
            }
            for run in [2, 3] {
                let got = ns.orthogonalize_all(&matrices).unwrap();
                differing(&format!("run {run}"), &|i| bits(&got[i]));
            }
            let got = ns.orthogonalize_all_as_iterated(&matrices).unwrap();
            let dtype = precision.on(&device);
            assert!(got.iter().all(|x| x.dtype() == dtype && x.is_contiguous()));
            differing("without widening", &|i| bits(&got[i]));
        }
    }
    table.finish();
}

/// A graph is made of the second call of a kind, and given other addresses in each that follows.
#[test]
#[ignore = "needs a GPU"]
fn calls_that_are_replayed_read_and_write_where_they_are_told() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels, matrices one after the other and together");
    for (rows, cols, dtype) in [
        (128, 256, DType::BF16),
        (256, 128, DType::F32),
        (100, 333, DType::F16),
        (1024, 1024, DType::BF16),
        (2048, 2048, DType::F32),
    ] {
        let x = random(&[7, rows, cols], 31, &device);
        let matrices: Vec<_> = (0..7)
            .map(|i| x.get(i).unwrap().to_dtype(dtype).unwrap().copy().unwrap())
            .collect();
        let ns = hopper(Method::Auto, Precision::F16);
        let expected = ns.orthogonalize_all(&matrices).unwrap();
        // All results live at once, so each is elsewhere.
        let one_by_one = |matrices: &[Tensor]| -> Vec<Tensor> {
            let one = |x: &Tensor| {
                ns.orthogonalize_all_as_iterated(slice::from_ref(x))
                    .unwrap()
            };
            matrices.iter().flat_map(one).collect()
        };
        let narrow = one_by_one(&matrices);
        let wide: Vec<_> = matrices
            .iter()
            .map(|x| ns.orthogonalize(x).unwrap())
            .collect();
        let in_turn: Vec<_> = (0..7)
            .map(|i| match i % 2 {
                0 => one_by_one(&matrices[i..=i]).remove(0),
                _ => ns.orthogonalize(&matrices[i]).unwrap(),
            })
            .collect();
        for (what, got) in [("f16", narrow), ("f32", wide), ("either in turn", in_turn)] {
            let differ = (0..7)
                .filter(|&i| bits(&got[i]) != bits(&expected[i]))
                .count();
            table.line(
                &format!("{rows} x {cols} from {dtype:?} to {what}"),
                &format!("{differ} of 7 differ"),
                differ == 0,
            );
        }
    }
    table.finish();
}

/// Alone they are computed in launches and in small tiles, together in one launch and tiles of 256,
/// and each is normalized before the next one is read.
#[test]
#[ignore = "needs a GPU"]
fn large_matrices_have_the_same_bits_in_any_batch() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels on large matrices, alone and together");
    for (rows, cols) in [(2048, 2056), (2037, 2101), (2101, 2037)] {
        let x = random(&[5, rows, cols], 12, &device);
        for precision in PRECISIONS {
            let ns = hopper(Method::Gram, precision);
            let together = ns.orthogonalize(&x).unwrap();
            let mut differing = 0;
            for i in 0..5 {
                let alone = ns.orthogonalize(&x.get(i).unwrap()).unwrap();
                let difference = (together.get(i).unwrap() - &alone).unwrap().abs().unwrap();
                let most = difference.max_all().unwrap().to_scalar::<f32>().unwrap();
                differing += usize::from(most != 0.0);
            }
            let choices = [1, 5].map(|count| {
                let choice = ns.choice(&device, count, rows, cols).unwrap().unwrap();
                choice.to_string()
            });
            table.line(
                &format!("{rows} x {cols} {precision}: {}", choices.join(", ")),
                &format!("{differing} of 5 differ"),
                differing == 0,
            );
        }
    }
    table.finish();
}

/// The first run launches one product after the other, later ones a graph, or all products together.
#[test]
#[ignore = "needs a GPU"]
fn a_thousand_runs_have_the_same_bits() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels, a thousand runs");
    for (batch, rows, cols) in [
        (1, 1024, 1024),
        (1, 300, 900),
        (3, 777, 1555),
        (12, 768, 768),
    ] {
        let x = random(&[batch, rows, cols], 5, &device);
        let ns = hopper(Method::Auto, Precision::F16);
        let choice = ns.choice(&device, batch, rows, cols).unwrap().unwrap();
        let expected = ns.orthogonalize(&x).unwrap();
        let mut differing = 0;
        for _ in 0..1000 {
            let got = ns.orthogonalize(&x).unwrap();
            let difference = (&got - &expected).unwrap().abs().unwrap();
            let most = difference.max_all().unwrap().to_scalar::<f32>().unwrap();
            differing += usize::from(most != 0.0);
        }
        table.line(
            &format!("{batch} x {rows} x {cols}, {choice}"),
            &format!("{differing} differ"),
            differing == 0,
        );
    }
    table.finish();
}

/// Of X = (A, I) the right half of the result is the polynomial of X Xᵀ times a number.
#[test]
#[ignore = "needs a GPU"]
fn symmetric_products_are_symmetric_bit_for_bit() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels, elements that differ from their mirror images");
    for n in [65, 300, 1024, 2048] {
        let identity = Tensor::eye(n, DType::F32, &device).unwrap();
        let identity = (identity * (n as f64).sqrt()).unwrap();
        let x = Tensor::cat(&[random(&[n, n], 11, &device), identity], 1).unwrap();
        for precision in PRECISIONS {
            for (method, steps) in [(Method::Standard, 1), (Method::Gram, 2)] {
                let ns = NewtonSchulz {
                    steps,
                    ..hopper(method, precision)
                };
                let right = ns.orthogonalize(&x).unwrap().narrow(1, n, n).unwrap();
                let differ = right.ne(&right.t().unwrap()).unwrap();
                let differ = differ.to_dtype(DType::F32).unwrap().sum_all().unwrap();
                let differ = differ.to_scalar::<f32>().unwrap();
                table.line(
                    &format!("{n} x {n} {method} {precision}"),
                    &differ.to_string(),
                    differ == 0.0,
                );
            }
        }
    }
    table.finish();
}

/// Batches of several shapes, in turn, as an optimizer has them.
#[test]
#[ignore = "needs a GPU"]
fn a_thousand_steps_take_no_more_memory_than_the_first() {
    let Some(device) = hopper_device() else {
        return;
    };
    let ns = hopper(Method::Auto, Precision::F16);
    let shapes = [(256, 256), (300, 1200), (1200, 300), (512, 512)];
    let matrices: Vec<_> = (0..12)
        .map(|i| random(&[shapes[i % 4].0, shapes[i % 4].1], i as u64, &device))
        .collect();
    let free = || {
        device.synchronize().unwrap();
        mem_get_info().unwrap().0
    };
    let step = || ns.orthogonalize_all_as_iterated(&matrices).unwrap();
    (0..10).for_each(|_| drop(step()));
    let before = free();
    (0..1000).for_each(|_| drop(step()));
    let after = free();
    println!("\nfree before and after 1,000 steps: {before} {after}");
    assert!(after >= before);
}

#[test]
#[ignore = "needs a GPU"]
fn magnitudes_do_not_matter() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels on scaled matrices");
    for (rows, cols) in [(100, 260), (260, 100), (65, 65)] {
        let x = gaussian(&[rows, cols], 6);
        for precision in PRECISIONS {
            let ns = hopper(Method::Auto, precision);
            let run = |x: &Tensor| ns.orthogonalize(&x.to_device(&device).unwrap()).unwrap();
            let expected = run(&x);
            for exponent in [-100, -60, 60, 100] {
                let scaled = (&x * 2f64.powi(exponent)).unwrap();
                let same = bits(&run(&scaled)) == bits(&expected);
                table.line(
                    &format!("{rows} x {cols} {precision} times 2^{exponent}"),
                    if same { "same bits" } else { "other bits" },
                    same,
                );
            }
            let expected = Matrix::from_tensor(&expected);
            for exponent in [-38, -30, 20, 37] {
                let scaled = (&x * 10f64.powi(exponent)).unwrap();
                let error = Matrix::from_tensor(&run(&scaled)).error_against(&expected);
                let bound = if precision == Precision::F16 {
                    3e-3
                } else {
                    3e-2
                };
                table.line(
                    &format!("{rows} x {cols} {precision} times 1e{exponent}"),
                    &format!("{error:.1e}"),
                    error < bound,
                );
            }
        }
    }
    table.finish();
}

#[test]
#[ignore = "needs a GPU"]
fn zero_and_bad_matrices_do_not_touch_their_neighbours() {
    let Some(device) = hopper_device() else {
        return;
    };
    for (rows, cols) in [(100, 300), (300, 100), (64, 64)] {
        for precision in PRECISIONS {
            let ns = hopper(Method::Auto, precision);
            let x = random(&[rows, cols], 8, &device);
            let zero = x.zeros_like().unwrap();
            let infinite = (&x / 0.0).unwrap();
            let matrices = [x.clone(), zero, infinite, x.clone()];
            let got = ns.orthogonalize_all(&matrices).unwrap();
            let alone = bits(&ns.orthogonalize(&x).unwrap());
            assert_eq!(bits(&got[0]), alone);
            assert!(bits(&got[1]).iter().all(|&x| x == 0));
            assert!(bits(&got[2]).iter().all(|&x| f32::from_bits(x).is_nan()));
            assert_eq!(bits(&got[3]), alone);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn other_numbers_of_steps_and_coefficients_agree_with_cublas() {
    let Some(device) = hopper_device() else {
        return;
    };
    let mut table = Table::new("Hopper kernels and cuBLAS, by coefficients and steps, against f32");
    let sets = [
        Coefficients::PolarExpress,
        Coefficients::You,
        Coefficients::custom(vec![[1.5, -0.5, 0.0]]).unwrap(),
    ];
    for (rows, cols) in [(200, 500), (500, 200)] {
        let x = random(&[rows, cols], 9, &device);
        for set in &sets {
            for steps in [1, 2, 3, 5, 7] {
                for method in METHODS {
                    let run = |kernels, iterate| {
                        let ns = NewtonSchulz {
                            kernels,
                            steps,
                            ..with(method, set.clone(), iterate)
                        };
                        let out = ns.orthogonalize(&x).unwrap();
                        Matrix::from_tensor(&out.to_device(&Device::Cpu).unwrap())
                    };
                    let exact = run(Kernels::Cublas, Precision::F32);
                    let allowed = run(Kernels::Cublas, Precision::F16).error_against(&exact);
                    let error = run(Kernels::Hopper, Precision::F16).error_against(&exact);
                    table.line(
                        &format!("{rows} x {cols} {method} {steps} of {set:?}"),
                        &format!("{error:.2e}, cuBLAS {allowed:.2e}"),
                        error <= 1.25 * allowed + 2e-4,
                    );
                }
            }
        }
    }
    table.finish();
}

#[test]
#[ignore = "needs a GPU"]
fn a_choice_can_be_forced_and_refused() {
    let device = device();
    let auto = NewtonSchulz::default();
    assert_eq!(auto.choice(&device, 0, 8, 8).unwrap(), None);
    let cublas = NewtonSchulz {
        kernels: Kernels::Cublas,
        ..auto.clone()
    };
    let choice = cublas.choice(&device, 2, 64, 64).unwrap().unwrap();
    assert_eq!(choice.products, Products::Cublas { bands: 1 });
    let f32 = hopper(Method::Auto, Precision::F32);
    let x = random(&[4, 4], 1, &device);
    assert!(matches!(
        f32.orthogonalize(&x),
        Err(Error::NoKernels {
            kernels: Kernels::Hopper,
            dtype: DType::F32,
            ..
        })
    ));
}
