//! The CUDA side against the CPU and the float64 oracles, on device 0. Each test prints what it
//! measured before it judges: run with `--include-ignored --nocapture cuda`.

mod elementwise;
mod hopper;
mod newton_schulz;
mod optimizer;
mod spectra;
mod survey;

use candle_core::Device;

/// A device of its own for each test, with a stream of its own.
fn device() -> Device {
    Device::new_cuda_with_stream(0).unwrap()
}

/// Prints a line a case, and fails at the end with all that were not as expected.
struct Table {
    title: &'static str,
    failures: Vec<String>,
}

impl Table {
    fn new(title: &'static str) -> Self {
        println!("\n{title}");
        Self {
            title,
            failures: Vec::new(),
        }
    }

    fn line(&mut self, case: &str, measured: &str, ok: bool) {
        println!("  {} {case:<52} {measured}", if ok { " " } else { "!" });
        if !ok {
            self.failures.push(format!("{case}: {measured}"));
        }
    }

    fn finish(self) {
        assert!(
            self.failures.is_empty(),
            "{}:\n{}",
            self.title,
            self.failures.join("\n")
        );
    }
}
