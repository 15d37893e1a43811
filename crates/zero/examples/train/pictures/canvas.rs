//! A sheet to draw on: a white card with a border, so that it reads on light and dark pages.

use std::fmt::{self, Display, Write};

pub(super) const INK: &str = "#1f2933";
pub(super) const FAINT: &str = "#6b7785";
pub(super) const GRID: &str = "#e4e8ec";

/// Anything drawn is in pixels from the upper left corner.
pub(super) struct Canvas {
    width: f64,
    height: f64,
    elements: String,
}

/// Where a text stands by its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Canvas {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            elements: String::new(),
        }
    }

    /// A text in a size and colour.
    pub(super) fn text(
        &mut self,
        x: f64,
        y: f64,
        anchor: Anchor,
        size: f64,
        colour: &str,
        text: impl Display,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escaped(&text.to_string());
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{text}</text>"#
        ));
    }

    /// A line; `style` holds further attributes.
    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), style: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.add(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" {style}/>"#
        ));
    }

    /// A line through points.
    pub(super) fn path(&mut self, points: impl IntoIterator<Item = (f64, f64)>, style: &str) {
        let points: Vec<_> = points
            .into_iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        self.add(format_args!(
            r#"<polyline points="{}" fill="none" {style}/>"#,
            points.join(" ")
        ));
    }

    /// A dot.
    pub(super) fn dot(&mut self, (x, y): (f64, f64), radius: f64, style: &str) {
        self.add(format_args!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" {style}/>"#
        ));
    }

    /// A rectangle, with words that show when a pointer rests on it.
    pub(super) fn rect(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        style: &str,
        hint: &str,
    ) {
        let hint = if hint.is_empty() {
            String::new()
        } else {
            format!("<title>{}</title>", escaped(hint))
        };
        self.add(format_args!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {style}>{hint}</rect>"#
        ));
    }

    /// The file.
    pub(super) fn finish(self) -> String {
        let Self {
            width,
            height,
            elements,
        } = self;
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<defs><pattern id="padding" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" fill="#fff"/><line x1="0" y1="0" x2="0" y2="5" stroke="{FAINT}" stroke-width="2"/></pattern></defs>
<rect x="0.5" y="0.5" width="{}" height="{}" rx="8" fill="#fff" stroke="#cbd2d9"/>
{elements}</svg>
"##,
            width - 1.0,
            height - 1.0,
        )
    }

    fn add(&mut self, element: fmt::Arguments<'_>) {
        writeln!(self.elements, "{element}").expect("a string grows");
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
