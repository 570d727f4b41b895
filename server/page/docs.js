// Shows the server's OpenAPI document; nothing is fetched from elsewhere.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  tryItOutEnabled: true,
  validatorUrl: null,
});
