//! A matrix gives the same bits alone, in any stack, and under any number of threads.

use std::process::Command;

use candle_core::Tensor;
use polarshard_muon::{Method, NewtonSchulz};

use crate::oracle::Matrix;
use crate::tensors::bits;

fn methods() -> [NewtonSchulz; 2] {
    [Method::Standard, Method::Gram].map(|method| NewtonSchulz {
        method,
        ..Default::default()
    })
}

/// Sizes on both sides of the blocks and thresholds of the matrix product.
#[test]
fn a_stack_does_not_change_its_matrices() {
    for (rows, cols) in [
        (3, 5),
        (17, 23),
        (64, 64),
        (70, 130),
        (130, 300),
        (300, 130),
    ] {
        let xs: Vec<_> = (0..5)
            .map(|seed| Matrix::gaussian(rows, cols, seed).to_tensor())
            .collect();
        let stack = Tensor::stack(&xs, 0).unwrap();
        for ns in methods() {
            let alone: Vec<_> = xs
                .iter()
                .map(|x| bits(&ns.orthogonalize(x).unwrap()))
                .collect();
            let whole = ns.orthogonalize(&stack).unwrap();
            let part = ns.orthogonalize(&stack.narrow(0, 2, 3).unwrap()).unwrap();
            for (i, alone) in alone.iter().enumerate() {
                assert_eq!(&bits(&whole.get(i).unwrap()), alone, "{rows}x{cols} {i}");
                if i >= 2 {
                    assert_eq!(&bits(&part.get(i - 2).unwrap()), alone, "{rows}x{cols} {i}");
                }
            }
        }
    }
}

#[test]
fn a_mix_of_shapes_gives_what_each_gives_alone_in_order() {
    let shapes = [(8, 30), (30, 8), (5, 5), (8, 30), (1, 7), (30, 8), (5, 6)];
    let xs: Vec<_> = shapes
        .iter()
        .zip(0..)
        .map(|(&(rows, cols), seed)| Matrix::gaussian(rows, cols, seed).to_tensor())
        .collect();
    for ns in methods() {
        let all = ns.orthogonalize_all(&xs).unwrap();
        assert_eq!(all.len(), xs.len());
        for (got, x) in all.iter().zip(&xs) {
            assert_eq!(got.dims(), x.dims());
            assert_eq!(
                bits(got),
                bits(&ns.orthogonalize(x).unwrap()),
                "{:?}",
                x.dims()
            );
        }
    }
}

const PRINT: &str = "POLARSHARD_PRINT_DIGEST";
const MARK: &str = "digest: ";

/// Runs itself in child processes: the number of threads is read once a process.
#[test]
fn threads_do_not_change_a_bit() {
    if std::env::var_os(PRINT).is_some() {
        println!("{MARK}{:016x}", digest());
        return;
    }
    let digest_under = |threads: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "determinism::threads_do_not_change_a_bit",
                "--nocapture",
            ])
            .env(PRINT, "1")
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (_, digest) = text.split_once(MARK).expect("the child prints its digest");
        digest[..16].to_owned()
    };
    let one = digest_under("1");
    assert_eq!(digest_under("2"), one);
    assert_eq!(digest_under("3"), one);
}

/// FNV-1a over the results of several shapes.
fn digest() -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for (rows, cols) in [(5, 9), (64, 200), (150, 150), (200, 333), (400, 130)] {
        let x = Matrix::gaussian(rows, cols, 1).to_tensor();
        for ns in methods() {
            for word in bits(&ns.orthogonalize(&x).unwrap()) {
                hash = (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    hash
}
