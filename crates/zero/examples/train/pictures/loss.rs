//! The losses of a run over its steps.

use super::canvas::{Anchor, Canvas, FAINT, GRID, INK};
use crate::curve::Curve;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 52.0;
/// The width of a character of the legend, nearly.
const CHARACTER: f64 = 7.0;

const RUN: &str = "#2f6fb5";
const HELD_OUT: &str = "#d1495b";
const OTHER: &str = "#e2a33d";

/// The curve of a run, and of another one, with its name, if there is one.
pub(crate) fn loss(title: &str, run: &Curve, other: Option<(&str, &Curve)>) -> String {
    let mut canvas = Canvas::new(WIDTH, HEIGHT);
    canvas.text(LEFT - 32.0, 30.0, Anchor::Start, 16.0, INK, title);
    let axes = Axes::of(
        [Some(run), other.map(|(_, curve)| curve)]
            .into_iter()
            .flatten(),
    );
    axes.draw(&mut canvas);
    if let Some((_, other)) = other {
        // Wide and below, so that it shows on both sides of the other, which should cover it.
        axes.training(
            &mut canvas,
            other,
            &format!(r#"stroke="{OTHER}" stroke-width="5" stroke-opacity="0.55""#),
        );
    }
    axes.training(
        &mut canvas,
        run,
        &format!(r#"stroke="{RUN}" stroke-width="1.4" stroke-linejoin="round""#),
    );
    let points: Vec<_> = run
        .held_out
        .iter()
        .map(|point| axes.at(point.step as f64, point.loss))
        .collect();
    canvas.path(
        points.iter().copied(),
        &format!(r#"stroke="{HELD_OUT}" stroke-width="1.6""#),
    );
    for point in points {
        canvas.dot(point, 3.5, &format!(r##"fill="{HELD_OUT}" stroke="#fff""##));
    }
    legend(&mut canvas, other.map(|(name, _)| name));
    canvas.finish()
}

/// What the lines are, in the upper right corner.
fn legend(canvas: &mut Canvas, other: Option<&str>) {
    let mut lines = vec![
        ("training".to_owned(), RUN, 2.0),
        ("held out".to_owned(), HELD_OUT, 2.0),
    ];
    lines.extend(other.map(|name| (format!("training, {name}"), OTHER, 5.0)));
    let longest = lines.iter().map(|(text, ..)| text.len()).max().unwrap_or(0);
    let text_left = RIGHT - (CHARACTER * longest as f64).max(136.0);
    for (index, (text, colour, width)) in lines.into_iter().enumerate() {
        let y = TOP + 18.0 + 20.0 * index as f64;
        canvas.line(
            (text_left - 34.0, y),
            (text_left - 8.0, y),
            &format!(r#"stroke="{colour}" stroke-width="{width}""#),
        );
        canvas.text(text_left, y + 4.0, Anchor::Start, 12.0, INK, text);
    }
}

/// From steps and losses to the sheet.
struct Axes {
    steps: f64,
    lowest: f64,
    highest: f64,
}

impl Axes {
    /// Axes that hold all points of some curves.
    fn of<'a>(curves: impl Iterator<Item = &'a Curve> + Clone) -> Self {
        let losses = curves.clone().flat_map(|curve| {
            let held_out = curve.held_out.iter().map(|point| point.loss);
            curve.training.iter().copied().chain(held_out)
        });
        let (lowest, highest) = losses.fold((f64::INFINITY, 0f64), |(low, high), loss| {
            (low.min(loss), high.max(loss))
        });
        let ends = curves.map(|curve| curve.start + curve.training.len());
        let steps = ends.max().unwrap_or(1);
        let lowest = (2.0 * lowest).floor() / 2.0;
        Self {
            steps: steps as f64,
            lowest,
            highest: ((2.0 * highest).ceil() / 2.0).max(lowest + 0.5),
        }
    }

    fn at(&self, step: f64, loss: f64) -> (f64, f64) {
        let x = LEFT + (RIGHT - LEFT) * step / self.steps;
        let y = BOTTOM - (BOTTOM - TOP) * (loss - self.lowest) / (self.highest - self.lowest);
        (x, y)
    }

    fn draw(&self, canvas: &mut Canvas) {
        for loss in ticks(self.lowest, self.highest, 10) {
            let (left, right) = (self.at(0.0, loss), self.at(self.steps, loss));
            canvas.line(left, right, &format!(r#"stroke="{GRID}""#));
            canvas.text(LEFT - 8.0, left.1 + 4.0, Anchor::End, 12.0, FAINT, loss);
        }
        for step in ticks(0.0, self.steps, 10) {
            let (x, y) = self.at(step, self.lowest);
            canvas.line((x, y), (x, y + 5.0), &format!(r#"stroke="{FAINT}""#));
            canvas.text(x, y + 20.0, Anchor::Middle, 12.0, FAINT, step);
        }
        canvas.line(
            (LEFT, BOTTOM),
            (RIGHT, BOTTOM),
            &format!(r#"stroke="{FAINT}""#),
        );
        canvas.text(
            LEFT - 32.0,
            TOP - 14.0,
            Anchor::Start,
            12.0,
            FAINT,
            "nats a byte",
        );
        canvas.text(RIGHT, BOTTOM + 38.0, Anchor::End, 12.0, FAINT, "step");
    }

    /// A step's loss is that of the weights before it.
    fn training(&self, canvas: &mut Canvas, curve: &Curve, style: &str) {
        let points = (curve.start..).zip(&curve.training);
        canvas.path(
            points.map(|(step, loss)| self.at(step as f64, *loss)),
            style,
        );
    }
}

/// Round numbers from `low` to `high`, `most` intervals at most.
fn ticks(low: f64, high: f64, most: usize) -> impl Iterator<Item = f64> {
    let rough = (high - low) / most as f64;
    let power = 10f64.powf(rough.log10().floor());
    let interval = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|digit| digit * power)
        .find(|interval| *interval >= rough);
    let interval = interval.unwrap_or(10.0 * power);
    let first = (low / interval - 1e-9).ceil() as i64;
    let last = (high / interval + 1e-9).floor() as i64;
    // The product of whole numbers and a power of ten may end in 0.30000000000000004.
    (first..=last).map(move |index| (index as f64 * interval * 1e6).round() / 1e6)
}
